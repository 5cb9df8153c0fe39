"""When a score that is below another is still competitive with it."""

# Two points of accuracy, as a share. The widest gap in Nyströmformer's Table 2 is 1.6 points.
MARGIN = 0.02


def is_competitive(gap: float, error: float, margin: float = MARGIN) -> bool | None:
    """Whether a score is at most a margin below another.

    Args:
        gap: How far it is above the other.
        error: Standard error of the gap.
        margin: The margin, in the same units.

    Returns:
        True if the gap less two standard errors is within the margin. False if it is not, and the score is below the
        other by more than two standard errors. None if the errors are too wide to tell.
    """
    if gap - 2 * error >= -margin:
        return True
    return False if gap < -2 * error else None
