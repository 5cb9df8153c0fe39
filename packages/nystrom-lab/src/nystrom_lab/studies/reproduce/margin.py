"""When a score that is below another is still competitive with it."""

from nystrom_lab.studies.reproduce.known import Known

# Two points of accuracy, as a share. The widest gap in Nyströmformer's Table 2 is 1.6 points.
MARGIN = 0.02


def is_competitive(gap: float, error: float, margin: float = MARGIN) -> bool | None:
    """Whether a score is at most a margin below another; None if that is within two standard errors of the gap.

    Args:
        gap: How far it is above the other.
        error: Standard error of the gap.
        margin: The margin, in the same units.
    """
    return Known(gap - 2 * error, gap + 2 * error).within(least=-margin)
