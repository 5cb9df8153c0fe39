"""Columns of users' files: the names that are looked for, and the values of a row as bytes.

One list of names serves all commands, ignoring case. Exactly one of them must be in a file; beside another one the
names of `_BESIDE` mean something else, such as where a text is from, and give way.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

TEXTS = ("text", "sentence", "review", "content", "Source")
FIRST_TEXTS = ("text1", "Source1", "sentence1", "question1", "premise", "question", "#1 String")
SECOND_TEXTS = ("text2", "Source2", "sentence2", "question2", "hypothesis", "sentence", "#2 String")
GOLD_LABEL = "gold_label"
LABELS = ("label", "class", "Target", "sentiment", GOLD_LABEL, "is_duplicate", "Quality", "score")
# The names that give way first come last.
_BESIDE = ("content", "Source", GOLD_LABEL, "is_duplicate", "Quality", "score")

# The fields that are wanted, in order: the option that names one, and the names that are looked for.
Wanted = Mapping[str, Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class TextColumns:
    """Columns of labelled texts in files.

    Attributes:
        texts: Names of the column of the texts, or of the first of each pair.
        pairs: Names of the column of the second text of each pair; None for single texts.
        labels: Names of the column of the labels.
        headless: Columns of those published files that have no header and tabs between fields; empty if all have one.
        longer_rows: Whether rows of such files may have more fields.
        broken_rows: Whether published files hold rows that lack fields; these are left out and counted.
    """

    texts: tuple[str, ...]
    pairs: tuple[str, ...] | None = None
    labels: tuple[str, ...] = ("label",)
    headless: tuple[str, ...] = ()
    longer_rows: bool = False
    broken_rows: bool = False

    def with_fields(
        self, *, text_field: str | None = None, label_field: str | None = None, pair_field: str | None = None
    ) -> Self:
        """The same with other column names; None for the usual ones. Single texts have no second (ValueError)."""
        if pair_field is not None and self.pairs is None:
            raise ValueError(f"pair_field is {pair_field!r}, but the task is on single texts: leave it out.")
        chosen = {"texts": text_field, "labels": label_field, "pairs": pair_field}
        return replace(self, **{name: (field,) for name, field in chosen.items() if field is not None})

    def wanted(self, *, labelled: bool) -> Wanted:
        """The wanted fields: the label, unless there is none, then the texts."""
        labels = {"label_field": self.labels} if labelled else {}
        return {**labels, "text_field": self.texts, **({} if self.pairs is None else {"pair_field": self.pairs})}


def own_columns(*, pairs: bool, pair_field: str | None = None, **fields: str | None) -> TextColumns:
    """The columns of a user's own texts, or pairs; None for the usual ones, see `TextColumns.with_fields`."""
    if not pairs:
        return TextColumns(texts=TEXTS, labels=LABELS).with_fields(pair_field=pair_field, **fields)
    firsts = FIRST_TEXTS
    if pair_field is not None:
        # The column of the second texts may have one of the names.
        firsts = tuple(name for name in (*TEXTS, *FIRST_TEXTS) if name.casefold() != pair_field.casefold())
    return TextColumns(texts=firsts, pairs=SECOND_TEXTS, labels=LABELS).with_fields(pair_field=pair_field, **fields)


def has_field(fields: Sequence[str], names: Sequence[str]) -> bool:
    """Whether one of the fields has one of these names, ignoring case."""
    return bool(_alike(fields, names))


def find_names(columns: Sequence[str], wanted: Wanted) -> list[str]:
    """Find the one name of each wanted field, or raise ValueError: none of its names is there, or several are."""
    chosen = []
    for option, names in wanted.items():
        flag, there = f"--{option.replace('_', '-')}", _alike(columns, names)
        if twice := [name for name in there if columns.count(name) > 1]:
            raise ValueError(f"the header names {twice[0]} twice: give each column a name of its own.")
        for name in reversed(_BESIDE):
            if len(there) > 1:
                there = [column for column in there if column.casefold() != name.casefold()] or there
        if len(there) != 1:
            came = f"both {there[0]!r} and {there[1]!r}" if there else f"no {' or '.join(map(repr, names))}"
            shown = ", ".join(repr(column[:40]) for column in columns[:12]) or "(none)"
            raise ValueError(f"there is {came} among the fields {shown}: name the right one with {flag}.")
        chosen += there
    if len({*chosen}) < len(chosen):
        flags = ", ".join(f"--{option.replace('_', '-')}" for option in wanted)
        raise ValueError(f"{flags} name one field twice ({', '.join(chosen)}): name one for each.")
    return chosen


def _alike(columns: Sequence[str], names: Sequence[str]) -> list[str]:
    """Find the columns of these names, ignoring case; a name that matches exactly takes precedence."""
    if len(names) == 1 and names[0] in columns:
        return [*names]
    folded = {name.casefold() for name in names}
    return [column for column in columns if column.casefold() in folded]


def all_as_bytes(
    values: Sequence[object], names: Sequence[str], wanted: Wanted, may_be_null: str | None
) -> list[bytes]:
    """Convert the values of a row to the form that they would have in a tsv file; the numbers 1 and 1.0 are both 1.

    A list of texts becomes its paragraphs, with a blank line between them, except as a label. The null of the field
    `may_be_null` of the wanted ones becomes empty.

    Raises:
        ValueError: A value is neither a text nor a number.
    """
    fields = []
    for value, name, option in zip(values, names, wanted, strict=True):
        if isinstance(value, list) and option != "label_field" and all(isinstance(part, str) for part in value):
            value = "\n\n".join(value)
        fields.append(b"" if value is None and option == may_be_null else _as_bytes(value, name))
    return fields


def _as_bytes(value: object, name: str) -> bytes:
    if isinstance(value, str):
        try:
            return value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(f"{name} holds half a character ({error.reason}): correct the text.") from error
    if isinstance(value, bool):
        return b"true" if value else b"false"
    if isinstance(value, float) and value.is_integer():
        return str(int(value)).encode()
    if isinstance(value, (int, float)) and value == value:
        return str(value).encode()
    raise ValueError(f"{name} is {str(value)[:60]}; expected a text or a number.")
