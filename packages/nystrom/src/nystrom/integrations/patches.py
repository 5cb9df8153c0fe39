"""Patches for transformers' models: how they handle a method's name and options when created, loaded and pickled.

Transformers lets any model take any registered name, drops what it does not know from the keyword arguments of
`AutoConfig.from_pretrained`, and knows nothing of this library in a process that did not import it.
`patch_transformers` adds to its base classes:

- A model that is made with the name of a method, or set to one, raises at once for what is known then
  (`nystrom.integrations.first_checks`): no attention that asks for a name (DeBERTa, MPNet), a causal layer and a method
  that is not, sinks, soft capping. So does one that picks its attention from a table of its own (GPT-J, GPT-Neo,
  Falcon), instead of a KeyError. Each part of a model counts as a model. A refused model keeps what it had.
- A part that a configuration does not have, such as attn_implementation={"vison_config": "near_far"}, raises.
- Layers that hold a copy of their part's configuration (EncoderDecoderModel) read that of the part, so that what is set
  later reaches them. Copies that differ from it (the halves of T5) stay, and get the options that it gets.
- Such a model refuses inputs that are longer than its table of positions (`nystrom.integrations.position_tables`).
- `attention_options` is an attribute of every configuration, so that `from_pretrained` of a configuration or a model
  takes it, and of a model also beside `config=`. All parts get it, as they do `attn_implementation`; parts that were
  saved with their own keep them.
- A mask of tokens is read by `nystrom.attention.mask_values` before transformers makes it boolean, so that an additive
  one, in which 0 is a real token, raises.
- A pickled configuration that names a method names this package, too: whoever unpickles it, such as a spawned process,
  imports the package, which registers the methods. If the package is missing, Python's error names it.

Setting a method on a model without any attention (FNet, ResNet) has no effect and does not raise: it may be part of
another model.
"""

import copy
import inspect
import sys
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, masking_utils

from nystrom.attention.mask_values import real_tokens
from nystrom.checks import check_names
from nystrom.integrations.attention_interface import SERVED
from nystrom.integrations.first_checks import check_asks_anywhere, check_model, check_reaches, unchanged_if_refused
from nystrom.integrations.layer_calls import INTERCEPTED
from nystrom.integrations.mask_interface import raise_ignores_attn_implementation
from nystrom.integrations.position_tables import watch_positions
from nystrom.integrations.relative_positions import read_tables

# The attribute of a part's configuration that lists the copies of it which its layers read.
_COPIES = "_attention_copies"


def patch_transformers() -> None:
    """Apply these patches to transformers' configurations and models."""
    # Kept under its own name among the attributes of the object, which transformers saves.
    setattr(PreTrainedConfig, "attention_options", property(_options, _set_options))  # noqa: B010 - unknown to checkers
    PreTrainedConfig.__reduce_ex__ = _reduce
    PreTrainedConfig.to_dict = _without_copies(PreTrainedConfig.to_dict)
    start, finish = PreTrainedModel.__init__, PreTrainedModel.post_init
    change = PreTrainedModel.set_attn_implementation
    named: Any = vars(PreTrainedConfig)["_attn_implementation"]

    def set_names(self: PreTrainedConfig, names: Any) -> None:
        _check_parts(self, names)
        named.fset(self, names)

    @wraps(change)
    def change_names(
        self: PreTrainedModel, attn_implementation: str | dict[str, Any], *others: Any, **named: Any
    ) -> None:
        _check_parts(self.config, attn_implementation)
        whole = attn_implementation.get("") if isinstance(attn_implementation, dict) else attn_implementation
        check_asks_anywhere(self, whole)
        with unchanged_if_refused(self):
            change(self, attn_implementation, *others, **named)
            _finish(self)

    @wraps(start)
    def init(self: PreTrainedModel, config: PreTrainedConfig, *inputs: Any, **named: Any) -> None:
        _check_table(type(self), config)
        start(self, config, *inputs, **named)

    @wraps(finish)
    def post_init(self: PreTrainedModel) -> None:
        finish(self)
        _finish(self)

    # An attribute for transformers that type checkers do not know, like the options above.
    setattr(PreTrainedConfig, "_attn_implementation", property(named.fget, set_names))  # noqa: B010
    PreTrainedModel.set_attn_implementation = change_names
    PreTrainedModel.__init__, PreTrainedModel.post_init = init, post_init
    PreTrainedModel.from_pretrained = _with_options(PreTrainedModel.from_pretrained)
    PreTrainedModel._from_config = _with_options(PreTrainedModel._from_config)
    masking_utils._preprocess_mask_arguments = _reading_masks(masking_utils._preprocess_mask_arguments)


def _reading_masks(prepare: Callable[..., Any]) -> Callable[..., Any]:
    """Transformers' first step of making any mask, with ValueError for a mask of tokens that it would misread."""

    @wraps(prepare)
    def read(config: Any, inputs_embeds: Any, attention_mask: Any, *others: Any, **named: Any) -> Any:
        is_ours = config._attn_implementation in (*SERVED, INTERCEPTED)
        if is_ours and isinstance(attention_mask, Tensor) and attention_mask.ndim == 2:
            attention_mask = real_tokens("attention_mask", attention_mask)
        return prepare(config, inputs_embeds, attention_mask, *others, **named)

    return read


def _finish(model: PreTrainedModel) -> None:
    """Check a model that is made, or set, and let its layers and its table of positions know what it is set to."""
    check_asks_anywhere(model, model.config._attn_implementation)
    share_configurations(model)
    check_reaches(model)
    check_model(model)
    if model.config._attn_implementation in SERVED:
        watch_positions(model)
        read_tables(model)


def _with_options(load: Any) -> Any:
    """A class method that makes a model from a configuration, and takes `attention_options` beside it."""
    function = load.__func__
    signature = inspect.signature(function)

    @wraps(function)
    def from_either(*given: Any, **named: Any) -> PreTrainedModel:
        bound = signature.bind(*given, **named)
        config, others = bound.arguments.get("config"), bound.arguments.get("kwargs", {})
        # Transformers would hand what it does not know to the model itself, which raises.
        if isinstance(config, PreTrainedConfig) and "attention_options" in others:
            config = bound.arguments["config"] = copy.deepcopy(config)
            config.attention_options = others.pop("attention_options")
        return function(*bound.args, **bound.kwargs)

    return classmethod(from_either)


def _check_parts(config: PreTrainedConfig, names: Any) -> None:
    """Raise for a part of a model that is to get a method and is not there; transformers would ignore it."""
    if not isinstance(names, Mapping):
        return
    for part, name in names.items():
        if isinstance(name, Mapping) and part in config.sub_configs:
            _check_parts(getattr(config, part), name)
        elif part and (isinstance(name, Mapping) or name in SERVED):
            check_names("part in attn_implementation", [part], config.sub_configs)


def share_configurations(model: nn.Module) -> None:
    """Let the layers of a part that is set to a method read the configuration of that part, not a copy of their own.

    The parts of an EncoderDecoderModel get its configurations, and their layers keep those that they were made of: what
    is set later, a name or options, would not reach them. Copies that differ, such as those of T5's halves, get the
    options that the part gets. A single layer with a copy was set by itself (`nystrom.integrations.set_attention`).
    """
    for part in (module for module in model.modules() if isinstance(module, PreTrainedModel)):
        ours = part.config
        holders: list[Any] = [each for each in part.modules() if type(getattr(each, "config", None)) is type(ours)]
        copies = {id(each.config): each.config for each in holders if each is not part}
        if not {config._attn_implementation for config in (ours, *copies.values())} & set(SERVED):
            continue
        theirs = next(iter(copies.values()), ours)
        if len(copies) == 1 and theirs is not ours and _without_options(ours) == _without_options(theirs):
            if _options(ours) is None:
                _set_options(ours, _options(theirs))
            for each in holders:
                each.config = ours
            continue
        # A copy with other options was set by itself.
        others = [each for each in copies.values() if each is not ours and _options(each) in (None, _options(ours))]
        if others:
            vars(ours)[_COPIES] = others
        for each in others if _options(ours) is not None else ():
            _set_options(each, _options(ours))


def _without_copies(to_dict: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """The attributes of a configuration that transformers saves and compares, without its list of copies."""

    @wraps(to_dict)
    def saved(self: PreTrainedConfig) -> dict[str, Any]:
        return {name: value for name, value in to_dict(self).items() if name != _COPIES}

    return saved


def _without_options(config: PreTrainedConfig) -> dict[str, Any]:
    return {name: value for name, value in config.to_dict().items() if name != "attention_options"}


def _check_table(kind: type[PreTrainedModel], config: PreTrainedConfig) -> None:
    """Raise for a model whose attention is a table of classes by name, without the method that it is set to."""
    method = getattr(config, "_attn_implementation", None)
    if method in SERVED and not kind._can_set_attn_implementation():
        names = vars(sys.modules[kind.__module__])
        if any(name.endswith("_ATTENTION_CLASSES") and method not in names[name] for name in names):
            raise_ignores_attn_implementation(kind, method)


def _options(config: PreTrainedConfig) -> dict[str, Any] | None:
    return vars(config).get("attention_options")


def _set_options(config: PreTrainedConfig, options: dict[str, Any] | None) -> None:
    """Set the options of a configuration, its parts and copies; while it is being read, its parts keep their own."""
    vars(config)["attention_options"] = options
    is_read = vars(config).get("_post_init_done", False)
    for part in (*(getattr(config, name, None) for name in config.sub_configs), *vars(config).get(_COPIES, ())):
        if isinstance(part, PreTrainedConfig) and (is_read or _options(part) is None):
            _set_options(part, options)


def _reduce(config: PreTrainedConfig, protocol: Any) -> tuple[Any, ...]:
    """Pickle a configuration; one that names a method uses `_remake`, so that unpickling imports this package."""
    make, made_of, *rest = object.__reduce_ex__(config, protocol)
    if vars(config).get("_attn_implementation_internal") in SERVED:
        make, made_of = _remake, (make, made_of)
    return make, made_of, *rest


def _remake(make: Callable[..., PreTrainedConfig], made_of: tuple[Any, ...]) -> PreTrainedConfig:
    return make(*made_of)
