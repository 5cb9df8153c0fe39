"""The figure of the study to which the rows belong."""

from collections.abc import Sequence
from pathlib import Path

from nystrom_lab.measure.rows import Row
from nystrom_lab.report.plots.efficiency import draw_efficiency
from nystrom_lab.report.plots.training import draw_training


def draw_study(rows: Sequence[Row], path: Path) -> None:
    """Draw the rows of a study: `draw_training` or `draw_efficiency`.

    Raises:
        ValueError: No rows that were measured, or a file of another format.
    """
    draw = draw_training if rows and rows[0].study == "training" else draw_efficiency
    draw(rows, path)
