"""Tables and plots of measured rows; measures nothing and needs no torch."""

from collections.abc import Sequence
from pathlib import Path

from nystrom_lab.measure.rows import Row


def check_place(study: str, folder: Path) -> None:
    """Check, before the work, that `show_study` will overwrite no picture of others, or raise ValueError.

    Pictures next to the rows of a study are taken to be its own.
    """
    from nystrom_lab.report.plots.mark import check_free

    if not (folder / f"{study}.csv").is_file():
        for suffix in (".png", ".svg"):
            check_free(folder / f"{study}{suffix}")


def show_study(rows: Sequence[Row], folder: Path) -> None:
    """Print the table of a study of `nystrom_papers.bench`, and plot it next to its rows as PNG and SVG."""
    from nystrom_papers.report.plots.speed import draw_study
    from nystrom_papers.report.tables import print_study

    name = rows[0].study
    print_study(rows)
    for suffix in (".png", ".svg"):
        draw_study(rows, folder / f"{name}{suffix}")
    print(f"Rows: {folder / f'{name}.csv'}\nFigure: {folder / f'{name}.png'}, and the same as .svg")
