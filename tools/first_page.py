"""Print the table of the first page, and draw its figure: one text through a whole encoder on a CPU.

    python tools/first_page.py
    python tools/first_page.py --figure docs/first-page.png

Both read rows of results/ and measure nothing; tools/write_tables.py puts the table on the page.
"""

import argparse
import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from nystrom_lab.measure.rows import Row, read_rows
from nystrom_lab.report.plots.canvas import COLUMN, Look, figure_of, house_style, method_look, save_figure
from nystrom_lab.report.plots.lines import spread
from nystrom_lab.report.table import Table, markdown_table
from nystrom_papers.report.engines import BESIDE_BEST, BESIDE_TORCH, ERROR, TIME

FASTEST = "fastest exact engine"
RESULTS = Path(__file__).resolve().parents[1] / "results"


class Shown(NamedTuple):
    """A line of the page; where a file of rows has none of it, "".

    Attributes:
        name: On the page.
        engine: In engines.csv.
        classifier: In long-documents.csv.
        searcher: In heal.csv.
        look: In the figure; None leaves it out.
    """

    name: str
    engine: str
    classifier: str = ""
    searcher: str = ""
    look: Look | None = None


SHOWN = (
    Shown("exact attention, PyTorch", "torch", "softmax", "exact-stretched", method_look("softmax")),
    Shown("exact attention, fastest engine", FASTEST),
    Shown("exact attention, int8", "onnxruntime-int8", look=Look("#D55E00", "^", "-.")),
    Shown("`near_far`", "near_far", "near_far", "near_far", method_look("near_far")),
    Shown("`nystrom`, 64 landmarks", "nystrom-64", "nystrom-64", "nystrom-64", method_look("nystrom")),
    Shown(
        "512-token chunks, exact attention", "pieces-512", searcher="windows of 512", look=Look("#009E73", "s", "--")
    ),
)


def engines() -> list[Row]:
    """The rows of engines, and those of the fastest exact one: its time beside that of torch."""
    rows = read_rows(RESULTS / "engines.csv")
    beside = [row for row in rows if (row.quantity, row.method) == (BESIDE_BEST, "torch")]
    return rows + [replace(row, quantity=BESIDE_TORCH, method=FASTEST, value=1 / row.value) for row in beside]


def last(rows: Iterable[Row], form: str, **wanted: object) -> str:
    """The value of the last row with these fields, as text; "" without one."""
    values = [row.value for row in rows if all(getattr(row, field) == value for field, value in wanted.items())]
    return form.format(values[-1]) if values else ""


def table() -> str:
    """The table, as Markdown."""
    times = engines()
    lengths = sorted({row.n for row in times if row.n is not None})
    reviews = [row for row in read_rows(RESULTS / "long-documents.csv") if row.study == "finetune own"]
    papers = [row for row in read_rows(RESULTS / "heal.csv") if row.study == "search papers"]
    lines = [
        [
            each.name,
            *(last(times, "{:.2f}", quantity=BESIDE_TORCH, method=each.engine, n=n) for n in lengths),
            last(times, "{:.2f}", quantity=ERROR, method=each.engine, n=lengths[-1]),
            last(reviews, "{:.0%}", quantity="test accuracy", method=each.classifier, n=4096),
            last(papers, "{:.0f}", quantity="passages found", method=each.searcher, n=2048),
        ]
        for each in SHOWN
    ]
    heads = [*(f"time, {n:,} tokens" for n in lengths), f"error, {lengths[-1]:,}"]
    return markdown_table(Table("", ["", *heads, "document classification", "retrieval hits, of 63"], lines))


@house_style()
def draw(to: Path) -> None:
    """Seconds over the length, one column wide; each line is named at its end, with its error there."""
    rows = engines()
    figure = figure_of(COLUMN, 3.4)
    axes = figure.subplots()
    ends = []
    for name, engine, *_, look in SHOWN:
        if look is None:
            continue
        timed = [row for row in rows if (row.quantity, row.method) == (TIME, engine) and not math.isnan(row.value)]
        if not timed:  # The engine was not installed.
            continue
        points = sorted((row.n or 0, row.value) for row in timed)
        axes.plot(*zip(*points, strict=True), color=look.colour, linestyle=look.line, marker=look.marker)
        error = last(rows, "{:.2f}", quantity=ERROR, method=engine, n=points[-1][0])
        ends.append((points[-1], f"{name.replace('`', '')}\nerror {error}", look))
    top = axes.get_ylim()[1]
    heights = spread([seconds / top for (_, seconds), _, _ in ends], 0.13)
    for ((longest, _), said, look), height in zip(ends, heights, strict=True):
        place = {"xytext": (6, 0), "textcoords": "offset points", "va": "center", "annotation_clip": False}
        axes.annotate(said, (longest, height * top), **place, color=look.colour, fontsize=8)
    ticks = sorted({row.n for row in rows if row.n is not None})
    axes.set(xlabel="tokens", ylabel="seconds for one text, two CPU cores", ylim=(0, top), xticks=ticks)
    save_figure(figure, to)


def main() -> None:
    """Print the table, or draw the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figure", type=Path, help="draw the figure into this file")
    figure = parser.parse_args().figure
    if figure is None:
        print(table())
    else:
        draw(figure)


if __name__ == "__main__":
    main()
