"""Draw the figure of the first page: the time to read one text, with exact attention and with ours, on CPU and GPU.

    python tools/draw_first_page.py

A whole encoder on two CPU cores, a whole encoder on a GPU, and attention alone on a GPU; a point is a row of results/.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from nystrom_lab.measure.rows import Row, read_rows
from nystrom_lab.report.plots.canvas import house_style, method_look, save_figure
from nystrom_lab.report.plots.lines import draw_lines

ROOT = Path(__file__).resolve().parents[1]
EXACT = "exact attention"
ON_CPU = {"softmax": EXACT, "nystrom-64": "nystrom", "near_far": "near_far"}
ON_GPU = {"softmax": EXACT, "nystrom-triton-64+skip": "nystrom", "near_far-triton": "near_far"}


def panel(file: str, methods: Mapping[str, str], **facts: str) -> list[Row]:
    """The forward times of some methods in a file of results/, under plain names."""
    rows = [row for row in read_rows(ROOT / "results" / file) if row.quantity == "forward time"]
    return [
        replace(row, method=name)
        for method, name in methods.items()
        for row in rows
        if row.method == method and all(row.fact(fact) == value for fact, value in facts.items())
    ]


@house_style()
def main() -> None:
    """Draw it."""
    panels = {
        "whole encoder, 2 CPU cores": panel("long-inputs.csv", ON_CPU, of="encoder"),
        "whole encoder, H100": panel("gpu-model.csv", ON_GPU),
        "attention alone, H200": panel("gpu-lengths.csv", ON_GPU),
    }
    looks = {EXACT: method_look("softmax")} | {name: method_look(name) for name in ("nystrom", "near_far")}
    figure = draw_lines(
        panels, over=lambda row: row.n, x_label="tokens", y_label="ms", band="", columns=3, share_y=False, looks=looks
    )
    for axes in figure.axes:
        axes.set_xticks([512, 2048, 8192, 32768])
    save_figure(figure, ROOT / "docs" / "first-page.png")


if __name__ == "__main__":
    main()
