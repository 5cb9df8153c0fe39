r"""Declarations of a study beside its measurements: tables, figures and claims, objects that read a frame of its rows.

A frame is a `pandas.DataFrame` with a line for each row: its columns are the fields of the row, its facts, and "row",
the row itself. A row without a spread has its value as both ends of it; a fact that a row does not have is "". The
column "number" counts the layers of a model from 1. If a declaration names a text with fields in braces, such as
"{method}, {weights}", the text is made for each row from its columns.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from nystrom.attention.method_names import split_name
from nystrom_lab.measure.rows import Row
from nystrom_lab.report.table import Table
from nystrom_papers.report.summary import OURS, Verdict
from nystrom_papers.studies.reproduce.study import Figures, Plan, Setting, Study

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FIELDS = ("quantity", "method", "value", "unit", "low", "high", "repeats", "n", "m", "dtype", "seed", "device", "note")

# Verdict of a rule: True, False, or None where the rows cannot tell, and the numbers that decide, in a sentence.
Answer = tuple[bool | None, str]
Rule = Callable[[pd.DataFrame], Answer]
# Values of a column that are shown, in order; a mapping gives their names.
Names = Mapping[str, Collection[Any]]
Pick = Callable[[Sequence[float]], float]
# This value of a column stands for the largest that the rows have, such as the longest n.
LONGEST = "the largest"


class NotMeasured(ValueError):
    """A rule needs a row that is not there, as in an unfinished study: the claim cannot be decided."""


def frame_of(rows: Sequence[Row]) -> pd.DataFrame:
    """The rows as a frame."""
    lines = [{**{name: getattr(row, name) for name in _FIELDS}, "row": row, **row.facts} for row in rows]
    # dtype=object keeps integers where some rows lack a value.
    frame = pd.DataFrame(
        lines, columns=list(dict.fromkeys([*_FIELDS, "row", *(k for line in lines for k in line)])), dtype=object
    )
    facts = [name for name in frame if name not in (*_FIELDS, "row")]
    frame[facts] = frame[facts].fillna("")
    if "layer" in facts:
        frame["number"] = [str(int(layer) + 1) if layer.isdigit() else layer for layer in frame["layer"]]
    frame["value"] = frame["value"].astype(float)
    for end in ("low", "high"):
        frame[end] = frame[end].astype(float).fillna(frame["value"])
    return frame


def select(frame: pd.DataFrame, quantity: str | Collection[str] | None = None, **where: Any) -> pd.DataFrame:
    """Lines of a frame that have these values; of a collection, any of them.

    A column that no row has is empty in all of them.
    """
    for name, wanted in (where if quantity is None else {"quantity": quantity, **where}).items():
        column = frame[name] if name in frame else pd.Series("", index=frame.index)
        wanted = column.max() if wanted is LONGEST else wanted
        several = isinstance(wanted, Collection) and not isinstance(wanted, str)
        frame = frame.loc[
            column.isin(list(wanted)) if several else column.isna() if wanted is None else column == wanted
        ]
    return frame


def each(frame: pd.DataFrame, quantity: str | Collection[str] | None = None, **where: Any) -> list[Any]:
    """The lines that have these values, with their columns as attributes, as `known` and the figures take rows."""
    return list(select(frame, quantity, **where).itertuples(index=False))


def by(frame: pd.DataFrame, quantity: str | Collection[str] | None, *names: str, **where: Any) -> dict[Any, Any]:
    """The lines that have these values, by another column or, as tuples, by several; the last one counts."""
    place = attrgetter(*names)
    return {place(line): line for line in each(frame, quantity, **where)}


def only(frame: pd.DataFrame, quantity: str, **where: Any) -> Any:
    """The one row of a frame that has these values.

    Raises:
        NotMeasured: There is none, or there are several.
    """
    rows = each(frame, quantity, **where)
    if len(rows) != 1:
        what = " ".join([quantity, *(f"{name}={value}" for name, value in where.items())])
        raise NotMeasured(f"there are {len(rows)} rows of {what}; expected one, as in a finished study.")
    return rows[0]


def column(frame: pd.DataFrame, quantity: str, over: str = "m", **where: Any) -> dict[Any, float]:
    """The values of a quantity, by another column.

    Raises:
        NotMeasured: There are none.
    """
    values = {getattr(line, over): line.value for line in each(frame, quantity, **where)}
    if not values:
        raise NotMeasured(" ".join(["no rows of", quantity, *(f"{name}={value}" for name, value in where.items())]))
    return values


def _named(frame: pd.DataFrame, names: Names) -> Iterator[dict[str, Any]]:
    """The lines that are shown, in the order of the names, with the names in place of the values."""
    for name, shown in names.items():
        frame = select(frame, **{name: shown})
    order = [[list(shown).index(value) for value in frame[name]] for name, shown in names.items()]
    places = sorted(range(len(frame)), key=lambda i: [column[i] for column in order])
    for line in frame.iloc[places].to_dict("records"):
        yield line | {name: shown[line[name]] for name, shown in names.items() if isinstance(shown, Mapping)}


class Cells:
    """The rows of which a column of a table has numbers, and the text of each number."""

    def __init__(
        self, head: str, quantity: str | Collection[str] | None, text: str = "{value:.3g}", *, pick: Pick | None = None,
        beside: "Sequence[Cells]" = (), on: tuple[str, ...] = ("method", "n"), **where: Any,
    ):  # fmt: skip
        """Choose the rows and their text.

        Args:
            head: The head of the column; one that differs between rows makes a column for each.
            quantity: The quantity.
            text: The text, from the columns of a row; {percent} is a hundred times its value, {short} its first
                figures.
            pick: min, max or fmean: the value of a cell that several rows would fill; None where only one may fill it.
            beside: Cells whose texts stand in this one's by their heads, for the same `on`; "" where there is no row.
            on: The columns that such a row shares.
            **where: Values of other columns.
        """
        self.head, self.quantity, self.text, self.where = head, quantity, text, where
        self.pick, self.beside, self.on = pick, beside, on

    def lines(self, frame: pd.DataFrame, names: Names) -> Iterator[dict[str, Any]]:
        """The lines that are shown, with the texts of the rows beside them as further columns."""
        others = {
            other.head: {tuple(line[x] for x in self.on): other.tell([line]) for line in other.lines(frame, {})}
            for other in self.beside
        }
        for line in _named(select(frame, self.quantity, **self.where), names):
            place = tuple(line.get(x) for x in self.on)
            # Empty, too, is a fact that no row has.
            yield defaultdict(str, line | {head: of.get(place, "") for head, of in others.items()})

    def tell(self, lines: Sequence[Mapping[str, Any]]) -> str:
        """The text of a cell that these rows fill."""
        value = self.pick([line["value"] for line in lines]) if self.pick else lines[0]["value"]
        short = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
        told = defaultdict(str, {**lines[0], "value": value, "percent": 100 * value, "short": short})
        # A row without a number says in its note why it was not measured.
        return "–" if math.isnan(value) else self.text.format_map(told)


@dataclass(frozen=True, kw_only=True)
class Pivot:
    """A table, or one for each title that its rows give.

    Attributes:
        title: Title.
        index: Texts of the leading columns that name a line, by their heads.
        columns: The other columns.
        names: The values of a column that are shown, in the order of the lines, and their names.
        missing: Text of a cell without a row.
        left: Leading columns that hold words; None means all of the index.
    """

    title: str
    index: Mapping[str, str]
    columns: Sequence[Cells]
    names: Names = field(default_factory=dict)
    missing: str = "–"
    left: int | None = None

    def tables(self, frame: pd.DataFrame) -> list[Table]:
        """The tables of a frame; a cell that two rows would fill raises ValueError."""
        by_title: dict[str, dict[tuple[str, ...], dict[tuple[int, str], list[dict[str, Any]]]]] = {}
        heads: dict[str, dict[tuple[int, str], None]] = {}
        for number, cell in enumerate(self.columns):
            for line in cell.lines(frame, self.names):
                title, place = self.title.format_map(line), (number, cell.head.format_map(line))
                index = tuple(text.format_map(line) for text in self.index.values())
                lines = by_title.setdefault(title, {}).setdefault(index, {}).setdefault(place, [])
                if lines and cell.pick is None:
                    raise ValueError(f"two rows fill {place[1]!r} of {', '.join(index)} in the table {title!r}.")
                lines.append(line)
                heads.setdefault(title, {})[place] = None
        left = len(self.index) if self.left is None else self.left
        if not by_title and "{" not in self.title:
            # Without rows it keeps its place among the tables, by which `nystrom report study` takes one.
            return [Table(self.title, [*self.index], [], left)]
        tables = []
        for title, lines in by_title.items():
            texts = [
                [*index, *(self.columns[at[0]].tell(of[at]) if at in of else self.missing for at in heads[title])]
                for index, of in lines.items()
            ]
            tables.append(Table(title, [*self.index, *(head for _, head in heads[title])], texts, left))
        return tables


@dataclass(frozen=True, kw_only=True)
class Lines:
    """A figure of lines over a size, in panels.

    Attributes:
        of: Values of the columns of the rows that are drawn: quantity, and others.
        over: The column of the horizontal axis, or another quantity of the same method and n.
        panel: Titles of the panels.
        line: Names of the lines; those of methods look as in every figure; {family} is the method without its size.
        names: The values of a column that are drawn, in the order of the panels and lines, and their names.
        levels: Values that the lines are compared with, dotted in each panel.
        x_label: Name of the horizontal axis.
        y_label: Name of the vertical axis.
        band: Meaning of a row's spread; "" for no bands.
        scale: Factor of the values, 100 for per cent.
        options: Further arguments of `nystrom_lab.report.plots.lines.draw_lines`.
    """

    of: Mapping[str, Any]
    over: str
    panel: str
    x_label: str
    y_label: str
    band: str
    line: str = "{method}"
    names: Names = field(default_factory=dict)
    levels: Sequence[float] = ()
    scale: float = 1
    options: Mapping[str, Any] = field(default_factory=dict)

    def draw(self, frame: pd.DataFrame) -> "Figure | None":
        """Draw the rows of a frame; None if it has none of them."""
        from nystrom_lab.report.plots.canvas import METHOD_LOOKS, REFERENCE, Look, look
        from nystrom_lab.report.plots.lines import draw_lines

        shown = pd.DataFrame(list(_named(select(frame, **self.of), self.names)), dtype=object)
        if shown.empty:
            return None
        shown[["value", "low", "high"]] *= self.scale
        shown["family"] = [split_name(method)[0] for method in shown["method"]]
        values = {} if self.over in frame else by(frame, self.over, "method", "n")
        places = zip(shown["method"], shown["n"], strict=True)
        overs = [getattr(values.get(place), "value", None) for place in places] if values else shown[self.over]
        shown["over"] = pd.Series([None if x in (None, "") else float(x) for x in overs], dtype=object)
        shown["panel"] = [self.panel.format_map(line) for line in shown.to_dict("records")]
        shown["method"] = [self.line.format_map(line) for line in shown.to_dict("records")]
        looks = {name: Look(*look(place)) for place, name in enumerate(shown["method"].unique())}
        methods = any(name.partition("-")[0] in METHOD_LOOKS for name in looks)
        panels = {str(title): each(of) for title, of in shown.groupby("panel", sort=False)}
        figure = draw_lines(
            panels,
            over=attrgetter("over"),
            x_label=self.x_label,
            y_label=self.y_label,
            band=self.band,
            looks=None if self.line == "{family}" or methods else looks,
            **self.options,
        )
        for axes in figure.axes[: len(panels)]:
            for level in self.levels:
                axes.axhline(level, color=REFERENCE, linewidth=0.6, linestyle=":")
        return figure


@dataclass(frozen=True)
class Claim:
    """A claim, and the rule that decides it.

    Attributes:
        says: The claim, in a sentence.
        rule: Decides it on the frame of the rows.
        source: The paper and the place that makes it; `OURS` for a claim of this library.
    """

    says: str
    rule: Rule
    source: str = OURS

    def decide(self, frame: pd.DataFrame, *, ours: bool) -> Verdict:
        """The verdict of the rule; "cannot tell" where it lacks rows.

        `ours` tells a claim of this library from those of a paper.
        """
        try:
            agrees, numbers = self.rule(frame)
        except NotMeasured as missing:
            agrees, numbers = None, f"not measured: {missing}"
        return Verdict(self.says, None if agrees is None else bool(agrees), numbers, ours and self.source == OURS)


Drawings = Callable[[pd.DataFrame, Path], Figures]


def declare(
    *,
    plan: Callable[[Setting], Plan],
    tables: Sequence[Pivot | Callable[[pd.DataFrame], Sequence[Table]]],
    claims: Sequence[Claim | Callable[[pd.DataFrame], Iterable[Claim]]] = (),
    figures: Mapping[str, Lines] | Drawings,
    framed: Callable[[Sequence[Row]], pd.DataFrame] = frame_of,
    **facts: Any,
) -> Study:
    """A study of declared tables, claims and figures.

    Args:
        plan: See `Study`.
        tables: The tables, in order; a function returns those that no pivot can state.
        claims: The claims, in order; a function returns those that depend on what was run, such as one a task.
        figures: Figures by name, "" for the main one, or a function that draws them from the rows and the folder.
        framed: Makes the frame of the rows, with further columns, or of merged rows.
        facts: The other fields of `Study`.
    """

    def draw(rows: Sequence[Row], folder: Path) -> Figures:
        if not isinstance(figures, Mapping):
            return figures(framed(rows), folder)
        drawn = {name: lines.draw(framed(rows)) for name, lines in figures.items()}
        return {name: figure for name, figure in drawn.items() if figure is not None}

    def verdicts(rows: Sequence[Row]) -> Sequence[Verdict]:
        frame = framed(rows)
        told = (claim for each in claims for claim in ([each] if isinstance(each, Claim) else each(frame)))
        return [claim.decide(frame, ours=facts["source"] != OURS) for claim in told]

    return Study(
        plan=plan,
        tables=lambda rows: [
            table
            for tabled in tables
            for table in (tabled.tables(framed(rows)) if isinstance(tabled, Pivot) else tabled(framed(rows)))
        ],
        verdicts=verdicts,
        figures=draw,
        **facts,
    )
