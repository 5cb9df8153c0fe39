"""The figure of whatever study the rows are of."""

from collections.abc import Sequence
from pathlib import Path

from nystrom_lab.measure.rows import Row
from nystrom_lab.report.plots.efficiency import draw_efficiency
from nystrom_lab.report.plots.ranks import draw_ranks
from nystrom_lab.report.plots.training import draw_training


def draw_study(rows: Sequence[Row], path: Path) -> None:
    """Draw the rows of a study: `draw_training`, `draw_ranks` or `draw_efficiency`.

    Raises:
        ValueError: No rows that were measured, or a file of another format.
    """
    draw = {"training": draw_training, "ranks": draw_ranks}.get(rows[0].study if rows else "", draw_efficiency)
    draw(rows, path)
