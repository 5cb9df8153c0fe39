"""When a score that is below another is still competitive with it."""

# Points of an accuracy, as a share; the widest gap in Nyströmformer's Table 2 is 1.6 points.
MARGIN = 0.02


def is_competitive(gap: float, error: float, margin: float = MARGIN) -> bool | None:
    """Whether a score is at most a margin below another.

    Args:
        gap: How far it is above the other.
        error: Standard error of the gap.
        margin: In the units of both.

    Returns:
        True where the gap less two standard errors is within the margin, False where it is not and the score is below
        the other by more than two standard errors, None where the errors are too wide to tell.
    """
    if gap - 2 * error >= -margin:
        return True
    return False if gap < -2 * error else None
