"""The figure of whatever study the rows are of."""

from collections.abc import Sequence
from pathlib import Path

from nystrom.measure.rows import Row
from nystrom.report.plots.efficiency import draw_efficiency
from nystrom.report.plots.training import draw_training


def draw_study(rows: Sequence[Row], path: Path) -> None:
    """Draw the rows of a study: `draw_training` or `draw_efficiency`.

    Raises:
        ValueError: No rows that were measured, or a file of another format.
    """
    training = bool(rows) and rows[0].study == "training"
    (draw_training if training else draw_efficiency)(rows, path)
