"""Draws are compared with a recursive generator, values with a recursive evaluator."""

import itertools
import random
import statistics
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from nystrom_lab.data.lra.listops.expressions import (
    CLOSE,
    DEEPEST,
    MAX,
    MED,
    MIN,
    OOV,
    PAD,
    SM,
    VOCABULARY,
    ZERO,
    Limits,
    draw_expressions,
    evaluate_expressions,
    is_expression,
    length_share,
)

NUMBER = {word: number for number, word in enumerate(VOCABULARY)}
APPLY = {
    "[MIN": min,
    "[MAX": max,
    "[MED": lambda values: int(statistics.median(values)),
    "[SM": lambda values: sum(values) % 10,
}
PUBLISHED = Limits(min_length=500, max_length=2000, max_depth=10, max_args=10)
# Nothing is discarded: max_depth 3 and max_args 4 make at most 2 + 4 * (2 + 4) = 26 tokens.
WHOLE = Limits(min_length=0, max_length=27, max_depth=3, max_args=4)


def numbered(text):
    return np.array([NUMBER[word] for word in text.split()], dtype=np.uint8)


def words(samples):
    return [
        [VOCABULARY[token] for token in samples.tokens[start:end]]
        for start, end in zip(samples.offsets[:-1], samples.offsets[1:], strict=True)
    ]


def recursive_value(sequence):
    """Consume one expression from the front of a list of words."""
    word = sequence.pop(0)
    if word in APPLY:
        values = []
        while sequence[0] != "X":
            values.append(recursive_value(sequence))
        sequence.pop(0)
        return APPLY[word](values)
    return int(word)


def nodes_of(sequence, max_depth):
    """List (depth, number of arguments) of all nodes, 0 arguments being a digit."""
    nodes, open_operators = [], []
    for word in sequence:
        if word == "X":
            nodes.append(open_operators.pop())
        else:
            if open_operators:
                open_operators[-1][1] += 1
            node = [len(open_operators) + 1, 0]
            (open_operators if word in APPLY else nodes).append(node)
    assert not open_operators
    assert max(depth for depth, _ in nodes) <= max_depth
    return nodes


def recursive_draw(rng, depth, limits):
    """The official recursion, words instead of trees."""
    if depth == limits.max_depth or rng.random() > 0.25:
        return [str(rng.randrange(10))]
    arguments = [recursive_draw(rng, depth + 1, limits) for _ in range(rng.randint(2, limits.max_args))]
    return [rng.choice(list(APPLY)), *itertools.chain.from_iterable(arguments), "X"]


def test_the_vocabulary_is_what_a_model_is_built_for():
    assert len(VOCABULARY) == len(set(VOCABULARY)) == 17
    assert (PAD, ZERO, MIN, MAX, MED, SM, CLOSE, OOV) == (0, 1, 11, 12, 13, 14, 15, 16)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7),
        ("[MAX 2 9 [MIN 4 7 X 0 X", 9),
        ("[MIN 2 9 [MAX 4 7 X X", 2),
        ("[SM 9 8 7 X", 4),
        ("[MED 1 4 X", 2),
        ("[MED 9 1 3 X", 3),
        ("[MED 9 1 4 3 X", 3),
        ("[SM [MED 5 8 X [MAX [SM 6 6 X 1 X 3 X", 1),
    ],
)
def test_values_known_by_hand(text, value):
    assert evaluate_expressions(numbered(text)).tolist() == [value]
    assert recursive_value(text.split()) == value


def test_values_agree_with_the_recursion():
    samples = draw_expressions(np.random.default_rng(1), 3000, PUBLISHED)
    assert samples.labels.size > 150
    assert samples.labels.tolist() == [recursive_value(sequence) for sequence in words(samples)]
    assert samples.labels.dtype == samples.tokens.dtype == np.uint8


def test_every_draw_is_one_expression_inside_the_limits():
    limits = Limits(min_length=9, max_length=13, max_depth=4, max_args=3)
    samples = draw_expressions(np.random.default_rng(2), 20_000, limits)
    # Strict at both ends, and both extremes occur.
    assert set(np.diff(samples.offsets)) == {10, 11, 12}
    for sequence in words(samples):
        assert is_expression(numbered(" ".join(sequence)))
        nodes_of(sequence, limits.max_depth)


def test_operators_arguments_and_digits_are_as_published():
    # Nothing is discarded, so the draw must show the plain frequencies; the seed is fixed.
    limits = Limits(min_length=0, max_length=2000, max_depth=4, max_args=10)
    sequences = words(draw_expressions(np.random.default_rng(3), 20_000, limits))
    assert len(sequences) == 20_000
    nodes = np.array([node for sequence in sequences for node in nodes_of(sequence, limits.max_depth)])
    depth, arity = nodes.T
    for level in (1, 2, 3):
        at_level = arity[depth == level]
        assert stats.binomtest(int((at_level > 0).sum()), at_level.size, 0.25).pvalue > 0.01
    assert (depth == 4).any()
    assert not arity[depth == 4].any()
    arguments = np.bincount(arity[arity > 0], minlength=11)
    assert arguments.size == 11
    assert not arguments[:2].any()
    assert stats.chisquare(arguments[2:]).pvalue > 0.01
    tokens = np.array([NUMBER[word] for sequence in sequences for word in sequence])
    assert stats.chisquare(np.bincount(tokens, minlength=17)[ZERO : ZERO + 10]).pvalue > 0.01
    assert stats.chisquare(np.bincount(tokens, minlength=17)[MIN:CLOSE]).pvalue > 0.01


@pytest.mark.parametrize("limits", [PUBLISHED, Limits(min_length=10, max_length=40, max_depth=5, max_args=6)])
def test_lengths_and_values_are_distributed_as_by_the_recursion(limits):
    rng = random.Random(4)
    expected = []
    while len(expected) < 400:
        sequence = recursive_draw(rng, 1, limits)
        if limits.min_length < len(sequence) < limits.max_length:
            expected.append(sequence)
    samples = draw_expressions(np.random.default_rng(5), 30_000, limits)
    lengths = np.diff(samples.offsets)
    assert lengths.size > 2000
    assert stats.ks_2samp(lengths, [len(sequence) for sequence in expected]).pvalue > 0.01
    counts = [samples.labels, [recursive_value(sequence) for sequence in expected]]
    table = np.array([np.bincount(values, minlength=10) for values in counts])
    assert stats.chi2_contingency(table).pvalue > 0.01


def test_the_shape_of_a_tree_is_distributed_as_by_the_recursion():
    # Which argument is nested, not only how many tokens there are: whole expressions, digits and operators masked.
    rng = random.Random(6)
    mask = dict.fromkeys("0123456789", "v") | dict.fromkeys(APPLY, "(") | {"X": ")"}
    drawn = words(draw_expressions(np.random.default_rng(7), 40_000, WHOLE))
    expected = [recursive_draw(rng, 1, WHOLE) for _ in range(40_000)]
    assert len(drawn) == 40_000
    shapes = [["".join(mask[word] for word in sequence) for sequence in sequences] for sequences in (drawn, expected)]
    common = [shape for shape, count in zip(*np.unique(shapes[1], return_counts=True), strict=True) if count > 40]
    assert len(common) > 20
    table = [[column.count(shape) for shape in common] for column in shapes]
    assert stats.chi2_contingency(np.array(table)).pvalue > 0.01


def test_the_share_of_expressions_that_are_kept_is_known():
    assert length_share(WHOLE) == pytest.approx(1, abs=1e-8)
    # A lone digit; an operator with two digits: 1/4 * 1/9 * (3/4)^2.
    assert length_share(Limits(0, 2, 10, 10)) == pytest.approx(0.75, abs=1e-8)
    assert length_share(Limits(3, 5, 10, 10)) == pytest.approx(0.25 / 9 * 0.75**2, abs=1e-8)
    kept = draw_expressions(np.random.default_rng(8), 50_000, PUBLISHED).labels.size
    assert stats.binomtest(kept, 50_000, length_share(PUBLISHED)).pvalue > 0.01


def test_a_chunk_without_a_single_fit_is_empty():
    limits = Limits(min_length=25, max_length=27, max_depth=3, max_args=4)
    samples = draw_expressions(np.random.default_rng(9), 1, limits)
    assert (samples.tokens.size, samples.offsets.tolist(), samples.labels.size) == (0, [0], 0)


def test_trees_that_are_too_long_grow_no_further():
    # A node has 51 / 4 children on average, so 400 whole trees of depth 5 hold about 11 million nodes.
    limits = Limits(min_length=0, max_length=2000, max_depth=5, max_args=100)
    tracemalloc.start()
    samples = draw_expressions(np.random.default_rng(10), 400, limits)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # Three quarters are lone digits.
    assert samples.labels.size > 250
    # A single array of 11 million nodes takes ten times that.
    assert peak < 8e6


@pytest.mark.parametrize(
    "text",
    ["", "X", "[MAX", "[MAX X", "[MAX 3", "3 X", "3 4", "[MAX 3 X X", "[MAX 3 X [MIN 3 X", "[MAX [MIN 3 X", "X 3 [MAX"],
)
def test_other_tokens_are_not_an_expression(text):
    assert not is_expression(numbered(text))
    assert is_expression(numbered("[MAX [MIN 3 4 X [SM 1 X X"))


@pytest.mark.long
def test_expressions_are_evaluated_to_a_depth_and_raise_beyond():
    deepest = numbered("[SM 1 " * DEEPEST + "7 " + "X " * DEEPEST)
    assert is_expression(deepest)
    assert evaluate_expressions(deepest).tolist() == [(7 + DEEPEST) % 10]
    assert not is_expression(np.concatenate([deepest[:1], deepest, deepest[-1:]]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"min_length": 2000}, "--min-length 2000 and --max-length 2000 leave no room"),
        ({"min_length": -1}, "--min-length -1"),
        ({"max_length": 10**9}, "which is 100000 at most"),
        ({"max_depth": 0}, "--max-depth is 0"),
        ({"max_args": 1}, "--max-args is 1"),
        # At most 2 + 10 * 1 tokens.
        ({"max_depth": 2}, "fewer than one in a million .* with --max-depth 2 and --max-args 10: widen the lengths"),
        # No expression has two or three tokens.
        ({"min_length": 1, "max_length": 4}, "fewer than one in a million"),
    ],
)
def test_impossible_limits_raise(change, message):
    with pytest.raises(ValueError, match=message):
        replace(PUBLISHED, **change)


def test_a_single_length_is_rare_but_possible():
    assert 1e-6 < length_share(replace(PUBLISHED, min_length=1998)) < 1e-4
