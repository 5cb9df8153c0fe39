"""Tables and plots of rows: reads what the studies measured, measures nothing, needs no torch."""

from collections.abc import Sequence
from pathlib import Path

from nystrom.measure.rows import Row


def show_study(rows: Sequence[Row], folder: Path) -> None:
    """Print the table of a study, and draw it beside its rows.

    Args:
        rows: What `run_efficiency` or `run_training` in `nystrom.studies.speed` returned.
        folder: Where it wrote its rows, such as efficiency.csv; efficiency.png goes there too.
    """
    from nystrom.report.plots import draw_study
    from nystrom.report.tables import print_study

    name = rows[0].study
    print_study(rows)
    draw_study(rows, folder / f"{name}.png")
    print(f"Rows: {folder / f'{name}.csv'}\nPlot: {folder / f'{name}.png'}")
