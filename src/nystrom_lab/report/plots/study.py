"""The figure of the study to which the rows belong."""

import math
from collections.abc import Sequence
from pathlib import Path

from nystrom_lab.measure.rows import Row
from nystrom_lab.report.plots.canvas import house_style, save_figure
from nystrom_lab.report.plots.efficiency import draw_efficiency
from nystrom_lab.report.plots.lines import draw_lines
from nystrom_lab.report.plots.training import draw_training


def draw_study(rows: Sequence[Row], path: Path) -> None:
    """Draw the rows of a study: `draw_training`, `draw_ranks` or `draw_efficiency`.

    Raises:
        ValueError: No rows that were measured, or a file of another format.
    """
    draw = {"training": draw_training, "ranks": draw_ranks}.get(rows[0].study if rows else "", draw_efficiency)
    draw(rows, path)


@house_style()
def draw_ranks(rows: Sequence[Row], path: Path) -> None:
    """Draw the bytes that a process sends, with a line for each method and number of processes.

    Args:
        rows: Rows of the study "ranks".
        path: The file, .png or .svg.

    Raises:
        ValueError: No measured rows of bytes, or a file of another format.
    """
    sent = [row for row in rows if row.quantity.endswith("bytes sent") and row.value > 0 and not math.isnan(row.value)]
    if not sent:
        raise ValueError("rows hold no bytes that were sent; expected a measurement of two processes or more.")
    panels = {
        quantity: [row for row in sent if row.quantity == quantity] for quantity in sorted({r.quantity for r in sent})
    }
    figure = draw_lines(panels, over=lambda row: row.n, x_label="tokens n", y_label="MB that a process sends", band="")
    save_figure(figure, path)
