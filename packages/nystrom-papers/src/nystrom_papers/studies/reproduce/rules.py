"""Rules that several claims share: all rows of a quantity lie between limits, or all ratios of two methods do."""

import math
from collections.abc import Callable
from typing import Any

import pandas as pd

from nystrom_papers.studies.reproduce.declared import Answer, Rule, by, each
from nystrom_papers.studies.reproduce.known import Known, holds_for_share

# A function that gives how precisely a row's number is known: `mean_of`, `quartiles_of` and the like.
Knows = Callable[[Any], Known]


def all_within(
    quantity: str,
    knows: Knows,
    text: str,
    *,
    limit: Callable[[Any], float],
    between: str = "; ",
    **where: Any,
) -> Rule:
    """All rows of a quantity are at most a limit.

    Args:
        quantity: The quantity.
        knows: A function that gives how precisely a row's number is known.
        text: Words for a row, from its columns.
        limit: The limit of a row; infinite for a row that the text names and that decides nothing.
        between: Text between two rows.
        **where: Values of other columns.
    """

    def decide(rows: pd.DataFrame) -> Answer:
        chosen = sorted(each(rows, quantity, **where), key=lambda row: row.n or 0)
        said = between.join(text.format_map(row._asdict()) for row in chosen)
        deciding = [row for row in chosen if limit(row) < math.inf]
        return holds_for_share(knows(row).within(most=limit(row)) for row in deciding), f"{said or 'not measured'}."

    return decide


def all_ratios(
    quantity: str, knows: Knows, text: str, ours: str, theirs: str, *, limit: float, over: str = "n", **where: Any
) -> Rule:
    """A method's value is at most a part of another's, at every size that both have.

    Args:
        quantity: The quantity.
        knows: A function that gives how precisely a row's number is known.
        text: Words for a size, from its number `at`, both rows and their `ratio`.
        ours: The method.
        theirs: The other.
        limit: The part.
        over: The column of the size.
        **where: Values of other columns.
    """

    def decide(rows: pd.DataFrame) -> Answer:
        one, two = (by(rows, quantity, over, method=name, **where) for name in (ours, theirs))
        # Skip points where the other method has zero error: there is no ratio.
        both = sorted(at for at in one.keys() & two.keys() if two[at].value > 0)
        said = "; ".join(
            text.format(at=at, ours=one[at].value, theirs=two[at].value, ratio=one[at].value / two[at].value)
            for at in both
        )
        holds = holds_for_share(knows(one[at]).over(knows(two[at])).within(most=limit) for at in both)
        return holds, f"{said or 'not measured'}."

    return decide
