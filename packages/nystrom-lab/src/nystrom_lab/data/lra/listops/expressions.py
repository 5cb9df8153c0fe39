r"""ListOps expressions: their tokens, their random draw, their value.

An expression is a digit, or an operator with its arguments: `[MAX 3 [SM 4 9 X X` has the value 3, where X closes. MIN,
MAX, MED (the median, rounded down) and SM (the sum modulo 10) take any number of arguments. A token's number is its
place in `VOCABULARY`.

The draw is a branching process. A node at depth $t$ (the root has $t = 1$) is an operator with probability 1/4 if $t$
is below the maximal depth $D$, and a digit otherwise; operators and digits are uniform, and so is the number of
arguments in $2, \dots, A$. A digit is one token long, an operator 2 plus its arguments. An expression is kept if
`min_length < length < max_length`. The length at depth $t$ has the generating function
$$P_t(z) = \tfrac34 z + \tfrac14 z^2 \frac{1}{A - 1} \sum_{k=2}^{A} P_{t+1}(z)^k, \qquad P_D(z) = z,$$
so the share of expressions that are kept is known before the first one is drawn.

Source: Nangia and Bowman (2018), arXiv:1804.06028; lengths and depth as in Tay et al. (2021), arXiv:2011.04006.
Departs from the authors' code: many expressions grow side by side, one depth at a time, instead of one after the other
by recursion, and one that is already too long grows no further. The distribution is the same.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nystrom_lab.data.store.token_files import TokenSamples

PAD, OOV = 0, 16
TASK = "listops"
PUBLISHED_COUNTS = {"train": 96_000, "val": 2_000, "test": 2_000}
VOCABULARY = ("<pad>", *"0123456789", "[MIN", "[MAX", "[MED", "[SM", "X", "<oov>")
ZERO = VOCABULARY.index("0")
MIN, MAX, MED, SM = (VOCABULARY.index(word) for word in ("[MIN", "[MAX", "[MED", "[SM"))
CLOSE = VOCABULARY.index("X")

# A random byte below this makes an operator: 64 of 256 is 1/4 exactly.
OPERATOR_BYTES = 64
# Up to here the share of expressions that are kept is computed in seconds.
LONGEST, DEEPEST_DRAWN = 100_000, 100
RAREST = 1e-6
# Depths are sorted as 16-bit integers, which numpy does in linear time.
DEEPEST = 2**15 - 1


@dataclass(frozen=True)
class Limits:
    """Which expressions are drawn.

    Args:
        min_length: An expression is longer than this.
        max_length: An expression is shorter than this.
        max_depth: Nodes at this depth are digits; the root has depth 1.
        max_args: The most arguments an operator takes.

    Raises:
        ValueError: A limit is out of range, or fewer than one expression in a million keeps the limits.
    """

    min_length: int
    max_length: int
    max_depth: int
    max_args: int

    def __post_init__(self) -> None:
        if not 0 <= self.min_length < self.max_length <= LONGEST:
            raise ValueError(
                f"--min-length {self.min_length} and --max-length {self.max_length} leave no room: the first must be at"
                f" least 0 and less than the second, which is {LONGEST} at most."
            )
        if not 1 <= self.max_depth <= DEEPEST_DRAWN:
            raise ValueError(f"--max-depth is {self.max_depth}; expected 1 to {DEEPEST_DRAWN}.")
        if not 2 <= self.max_args <= LONGEST:
            raise ValueError(f"--max-args is {self.max_args}; expected 2 to {LONGEST}.")
        if (share := length_share(self)) < RAREST:
            raise ValueError(
                f"fewer than one in a million expressions (about {max(share, 0.0):.0e}) are longer than"
                f" --min-length {self.min_length} and shorter than --max-length {self.max_length} with --max-depth"
                f" {self.max_depth} and --max-args {self.max_args}: widen the lengths, or change the other two."
            )


def length_share(limits: Limits) -> float:
    """Give the probability that a random expression keeps the limits, to about eight digits after the point."""
    # The coefficients come out of a Fourier transform on a circle; its radius below 1 damps what folds back from
    # higher powers.
    points = 2 * limits.max_length
    radius = 1e-10 ** (1 / points)
    z = radius * np.exp(2j * np.pi * np.arange(points) / points)
    p = z
    # Each depth adds at least three tokens, so beyond max_length depths nothing changes.
    for _ in range(min(limits.max_depth - 1, limits.max_length)):
        # p^2 + ... + p^A as a finite geometric series; p = 1 is out of reach inside the unit circle.
        arguments = (p**2 - p ** (limits.max_args + 1)) / (1 - p)
        p = 0.75 * z + 0.25 * z**2 * arguments / (limits.max_args - 1)
    lengths = np.arange(limits.min_length + 1, limits.max_length)
    return float((np.fft.fft(p).real[lengths] / points / radius**lengths).sum())


def draw_expressions(rng: np.random.Generator, attempts: int, limits: Limits) -> TokenSamples:
    """Draw expressions and return, with their values, those that keep the limits, in the order drawn."""
    arities = _grow(rng, attempts, limits)
    # Level by level from the leaves: how many tokens each node spans.
    spans: list[NDArray[np.int64]] = []
    for arity in reversed(arities):
        span = np.ones(arity.size, dtype=np.int64)
        operators = np.flatnonzero(arity)
        if operators.size:
            first = np.cumsum(arity[operators]) - arity[operators]
            span[operators] = 2 + np.add.reduceat(spans[-1], first)
        spans.append(span)
    spans.reverse()
    offsets = np.concatenate([[0], np.cumsum(spans[0])])
    tokens = np.full(offsets[-1], PAD, dtype=np.uint8)
    # The second pass goes from the root: where each node begins.
    begin = offsets[:-1]
    for depth, (arity, span) in enumerate(zip(arities, spans, strict=True)):
        operators = np.flatnonzero(arity)
        digits = np.flatnonzero(arity == 0)
        tokens[begin[digits]] = rng.integers(ZERO, ZERO + 10, size=digits.size, dtype=np.uint8)
        tokens[begin[operators]] = rng.integers(MIN, SM, size=operators.size, dtype=np.uint8, endpoint=True)
        tokens[begin[operators] + span[operators] - 1] = CLOSE
        if operators.size:
            count = arity[operators]
            before = np.cumsum(spans[depth + 1]) - spans[depth + 1]
            first = np.cumsum(count) - count
            begin = before + np.repeat(begin[operators] + 1 - before[first], count)
        else:
            begin = np.zeros(0, dtype=np.int64)
    return TokenSamples(tokens, offsets, evaluate_expressions(tokens))


def _grow(rng: np.random.Generator, attempts: int, limits: Limits) -> list[NDArray[np.int64]]:
    """Draw trees, and for those that keep the limits return the arity of each node (0: a digit), depth by depth."""
    levels: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
    length = np.zeros(attempts, dtype=np.int64)
    tree = np.arange(attempts)
    for depth in range(1, limits.max_depth + 1):
        arity = np.zeros(tree.size, dtype=np.int64)
        if depth < limits.max_depth:
            operators = np.flatnonzero(rng.integers(0, 256, size=tree.size, dtype=np.uint8) < OPERATOR_BYTES)
            arity[operators] = rng.integers(2, limits.max_args, size=operators.size, endpoint=True)
        else:
            operators = np.zeros(0, dtype=np.int64)
        levels.append((tree, arity))
        length += np.bincount(tree, minlength=attempts) + np.bincount(tree[operators], minlength=attempts)
        # A tree that is too long once its next level is counted gets no next level, so no more than
        # attempts * max_length nodes are ever held.
        coming = np.bincount(tree[operators], weights=arity[operators], minlength=attempts)
        length[length + coming >= limits.max_length] = limits.max_length
        operators = operators[length[tree[operators]] < limits.max_length]
        tree = np.repeat(tree[operators], arity[operators])
    fits = (length > limits.min_length) & (length < limits.max_length)
    return [arity[fits[tree]] for tree, arity in levels]


def evaluate_expressions(tokens: NDArray[np.unsignedinteger]) -> NDArray[np.uint8]:
    """Compute the value of each of the expressions, which are end to end and well formed (`is_expression`)."""
    depth = _depth(tokens)
    nodes = np.flatnonzero(tokens != CLOSE)
    # Sorted by depth, the arguments of an operator are side by side, in the order of their operators.
    nodes = nodes[np.argsort(depth[nodes].astype(np.int16), kind="stable")]
    ends = np.cumsum(np.bincount(depth[nodes]))
    arguments, values = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    for level in reversed(np.split(nodes, ends[:-1])):
        operator = tokens[level]
        value = operator.astype(np.int64) - ZERO
        inner = np.flatnonzero(operator >= MIN)
        if inner.size:
            value[inner] = _apply(operator[inner], values, np.searchsorted(arguments, level[inner]))
        arguments, values = level, value
    return values.astype(np.uint8)


def _apply(operator: NDArray[np.uint8], values: NDArray[np.int64], first: NDArray[np.int64]) -> NDArray[np.int64]:
    """Apply each operator to its arguments: `values` from its entry in `first` to the next one's."""
    end = np.append(first[1:], values.size)
    group = np.repeat(np.arange(first.size), end - first)
    ordered = np.sort(group * 16 + values) % 16
    median = (ordered[(first + end - 1) // 2] + ordered[(first + end) // 2]) // 2
    total = np.add.reduceat(values, first) % 10
    return np.select(
        [operator == MIN, operator == MAX, operator == MED], [ordered[first], ordered[end - 1], median], total
    )


def is_expression(tokens: NDArray[np.uint8]) -> bool:
    """Check whether the tokens are one expression: brackets in pairs, an argument in each, nothing before or after.

    One that nests deeper than `DEEPEST` is none, since `evaluate_expressions` cannot follow it.
    """
    opens, closes = (tokens >= MIN) & (tokens < CLOSE), tokens == CLOSE
    if tokens.size < 2:
        return tokens.size == 1 and not opens[0] and not closes[0]
    depth = _depth(tokens)
    # The last token closes what the first one opened, since all between them is inside.
    one = closes[-1] and depth[-1] == 0 and depth[1:-1].min(initial=1) > 0
    return bool(one and depth.max() <= DEEPEST and not (opens[:-1] & closes[1:]).any())


def _depth(tokens: NDArray[np.uint8]) -> NDArray[np.int32]:
    """Count the operators around each token; an operator's closing token has the operator's own depth."""
    opens = (tokens >= MIN) & (tokens < CLOSE)
    step = opens.astype(np.int8) - (tokens == CLOSE)
    return np.cumsum(step, dtype=np.int32) - opens


def shuffle_arguments(tokens: NDArray[np.unsignedinteger], rng: np.random.Generator) -> NDArray[np.unsignedinteger]:
    """Put the arguments of every operator of one expression into a random order, all orders being equally likely."""
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
