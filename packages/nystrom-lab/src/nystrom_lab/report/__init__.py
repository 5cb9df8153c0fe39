"""Tables and plots of measured rows; measures nothing and needs no torch."""

from collections.abc import Sequence
from pathlib import Path

from nystrom_lab.measure.rows import Row


def check_place(study: str, folder: Path) -> None:
    """Check, before the work, that `show_study` will overwrite no picture of others.

    Pictures next to the rows of a study are taken to be its own.

    Args:
        study: Name of the study.
        folder: Folder that it will write to.

    Raises:
        ValueError: There is a file that this project did not draw.
    """
    from nystrom_lab.report.plots.mark import check_free

    if not (folder / f"{study}.csv").is_file():
        for suffix in (".png", ".svg"):
            check_free(folder / f"{study}{suffix}")


def show_study(rows: Sequence[Row], folder: Path) -> None:
    """Print the table of a study, and plot it next to its rows as PNG and SVG.

    Args:
        rows: What `run_efficiency`, `run_model` or `run_training` in `nystrom_lab.bench` returned.
        folder: Folder of its rows, such as efficiency.csv; efficiency.png and efficiency.svg are written there as well.
    """
    from nystrom_lab.report.plots.speed import draw_study
    from nystrom_lab.report.tables import print_study

    name = rows[0].study
    print_study(rows)
    for suffix in (".png", ".svg"):
        draw_study(rows, folder / f"{name}{suffix}")
    print(f"Rows: {folder / f'{name}.csv'}\nFigure: {folder / f'{name}.png'}, and the same as .svg")
