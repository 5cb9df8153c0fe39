"""Classes whose call is made of their fields show it on the site: named tuples, and configurations of transformers.

An extension of griffe, which reads the code for the site without importing it, and knows dataclasses alone.
"""

from griffe import Class, Extension, Function, Parameter, ParameterKind, Parameters

# How the fields are passed, by the class that makes the call.
_KINDS = {
    "NamedTuple": ParameterKind.positional_or_keyword,
    "PreTrainedConfig": ParameterKind.keyword_only,
}


class CallLines(Extension):
    """Adds `__init__`, with a parameter for each field."""

    def on_class_members(self, *, cls: Class, **_: object) -> None:
        """Add it once all members of the class are known."""
        for kind in (kind for base, kind in _KINDS.items() if base in map(str, cls.bases)):
            fields = [
                Parameter(field.name, annotation=field.annotation, kind=kind, default=field.value)
                for field in cls.attributes.values()
                if field.annotation is not None and "property" not in field.labels
            ]
            bound = Parameter("self", kind=ParameterKind.positional_or_keyword)
            cls.set_member("__init__", Function("__init__", parameters=Parameters(bound, *fields)))
