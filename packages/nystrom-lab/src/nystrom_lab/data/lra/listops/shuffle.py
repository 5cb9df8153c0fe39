"""ListOps expressions with the arguments of every operator in another order, which have the same value.

MIN, MAX, MED and SM do not depend on the order of their arguments, so each of an operator's k! orders is as good a
sample as the drawn one. All operators are shuffled, each by itself, the nested ones with their arguments inside.
"""

import numpy as np
from numpy.typing import NDArray

from nystrom_lab.data.lra.listops.expressions import CLOSE, MIN


def shuffle_arguments(tokens: NDArray[np.unsignedinteger], rng: np.random.Generator) -> NDArray[np.unsignedinteger]:
    """Put the arguments of every operator into a random order, all orders being equally likely.

    Args:
        tokens: One well-formed expression, see `is_expression`.
        rng: Decides the orders.
    """
    keys = rng.random(len(tokens)).tolist()
    # The operators that are open, each with its arguments so far, and the key by which it will be sorted itself.
    opened: list[tuple[float, list[int], list[tuple[float, list[int]]]]] = [(0.0, [], [])]
    for token, key in zip(tokens.tolist(), keys, strict=True):
        if token == CLOSE:
            own, operator, arguments = opened.pop()
            arguments.sort(key=_key)
            opened[-1][2].append((own, [*operator, *(part for _, parts in arguments for part in parts), CLOSE]))
        elif token >= MIN and token < CLOSE:
            opened.append((key, [token], []))
        else:
            opened[-1][2].append((key, [token]))
    ((_, whole),) = opened[0][2]
    return np.array(whole, dtype=tokens.dtype)


def _key(argument: tuple[float, list[int]]) -> float:
    return argument[0]
