"""Print the table of the first page, and draw its figure: one text through a whole encoder on a CPU.

    python tools/first_page.py
    python tools/first_page.py --figure docs/first-page.png

Both read rows of results/ and measure nothing; tools/write_tables.py puts the table on the page.
"""

import argparse
from collections.abc import Iterable
from pathlib import Path

from nystrom_lab.measure.rows import Row, read_rows
from nystrom_lab.report.plots.canvas import COLUMN, figure_of, house_style, method_look, save_figure
from nystrom_lab.report.plots.lines import spread
from nystrom_lab.report.table import Table, markdown_table

RESULTS = Path(__file__).resolve().parents[1] / "results"
LENGTHS = (2048, 4096, 8192)
TIME, RATIO, ERROR = "forward time", "forward time / exact", "relative error of the hidden states"
# The name on the page, and for each of the three files the method of its rows; "" where it was not measured.
SHOWN = (
    ("exact attention", "softmax", "softmax", "exact-stretched"),
    ("`near_far`", "near_far", "near_far", "near_far"),
    ("`nystrom`, 64 landmarks", "nystrom-64", "nystrom-64", "nystrom-64"),
    ("exact, each 512 tokens alone", "", "", "windows of 512"),
)


def encoder() -> list[Row]:
    """The rows of a whole encoder."""
    rows = read_rows(RESULTS / "long-inputs.csv")
    return [row for row in rows if row.fact("of") == "encoder" or row.quantity == ERROR]


def last(rows: Iterable[Row], form: str, **wanted: object) -> str:
    """The value of the last row with these fields, as text; "" without one."""
    values = [row.value for row in rows if all(getattr(row, field) == value for field, value in wanted.items())]
    return form.format(values[-1]) if values else ""


def table() -> str:
    """The table, as Markdown."""
    times = encoder()
    reviews = [row for row in read_rows(RESULTS / "long-documents.csv") if row.study == "finetune own"]
    papers = [row for row in read_rows(RESULTS / "heal.csv") if row.study == "search papers"]
    lines = [
        [
            name,
            *(last(times, "{:.2f}", quantity=RATIO, method=engine, n=n) for n in LENGTHS),
            last(times, "{:.2f}", quantity=ERROR, method=engine, n=LENGTHS[-1]),
            last(reviews, "{:.0%}", quantity="test accuracy", method=classifier, n=4096),
            last(papers, "{:.0f}", quantity="passages found", method=searcher, n=2048),
        ]
        for name, engine, classifier, searcher in SHOWN
    ]
    times = [f"time, {n:,} tokens" for n in LENGTHS]
    heads = ["", *times, f"error, {LENGTHS[-1]:,}", "documents classified", "passages found, of 63"]
    return markdown_table(Table("", heads, lines))


@house_style()
def draw(to: Path) -> None:
    """Seconds over the length, one column wide; each line is named at its end, with its error there."""
    rows = encoder()
    figure = figure_of(COLUMN, 3.2)
    axes = figure.subplots()
    shown = [(name, engine) for name, engine, *_ in SHOWN if engine]
    ends = []
    for name, engine in shown:
        points = sorted((row.n or 0, row.value / 1e3) for row in rows if (row.quantity, row.method) == (TIME, engine))
        look = method_look(engine)
        axes.plot(*zip(*points, strict=True), color=look.colour, linestyle=look.line, marker=look.marker)
        error = last(rows, "{:.2f}", quantity=ERROR, method=engine, n=points[-1][0])
        ends.append((points[-1], f"{name.replace('`', '')}\nerror {error}", look))
    top = axes.get_ylim()[1]
    heights = spread([seconds / top for (_, seconds), _, _ in ends], 0.14)
    for ((longest, _), said, look), height in zip(ends, heights, strict=True):
        place = {"xytext": (6, 0), "textcoords": "offset points", "va": "center", "annotation_clip": False}
        axes.annotate(said, (longest, height * top), **place, color=look.colour, fontsize=8.5)
    axes.set(xlabel="tokens", ylabel="seconds to read a text, two CPU cores", ylim=(0, top), xticks=[0, *LENGTHS])
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
