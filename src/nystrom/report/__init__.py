"""Tables and plots of rows: reads what the studies measured, measures nothing, needs no torch."""

from collections.abc import Sequence
from pathlib import Path

from nystrom.records import Row


def show_efficiency(rows: Sequence[Row], folder: Path) -> None:
    """Print the table of an efficiency run, and draw it beside its rows.

    Args:
        rows: What `nystrom.bench.efficiency.run_efficiency` returned.
        folder: Where it wrote efficiency.csv; efficiency.png goes there too.
    """
    from nystrom.report.plots import draw_efficiency
    from nystrom.report.tables import print_efficiency

    print_efficiency(rows)
    draw_efficiency(rows, folder / "efficiency.png")
    print(f"Rows: {folder / 'efficiency.csv'}\nPlot: {folder / 'efficiency.png'}")
