"""Arguments in another order leave an expression what it was, and all orders are equally likely."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nystrom_lab.data.lra.listops.expressions import (
    VOCABULARY,
    Limits,
    draw_expressions,
    evaluate_expressions,
    is_expression,
    shuffle_arguments,
)


def tokens_of(text):
    return np.array([VOCABULARY.index(word) for word in text.split()], dtype=np.uint8)


def text_of(tokens):
    return " ".join(VOCABULARY[token] for token in tokens)


@given(st.integers(0, 2**32), st.integers(0, 2**32))
def test_the_value_and_the_tokens_stay(seed, other):
    limits = Limits(min_length=0, max_length=120, max_depth=6, max_args=5)
    drawn = draw_expressions(np.random.default_rng(seed), 20, limits)
    for start, stop, label in zip(drawn.offsets, drawn.offsets[1:], drawn.labels, strict=False):
        tokens = drawn.tokens[start:stop]
        shuffled = shuffle_arguments(tokens, np.random.default_rng(other))
        assert shuffled.dtype == tokens.dtype
        assert is_expression(shuffled)
        assert evaluate_expressions(shuffled).tolist() == [label]
        assert Counter(shuffled.tolist()) == Counter(tokens.tolist())


def test_each_order_is_as_likely_as_another_and_arguments_stay_whole():
    tokens = tokens_of("[MAX 1 [SM 2 3 X 4 X")
    seen = Counter(text_of(shuffle_arguments(tokens, np.random.default_rng(seed))) for seed in range(2400))
    # 3! orders outside, 2 inside.
    assert len(seen) == 12
    assert all("[SM 2 3 X" in text or "[SM 3 2 X" in text for text in seen)
    # 200 expected; five standard deviations of a binomial count are 68.
    assert min(seen.values()) > 132
    assert max(seen.values()) < 268


@pytest.mark.parametrize("text", ["7", "[MIN 3 X"])
def test_what_has_one_order_stays(text):
    tokens = tokens_of(text)
    assert shuffle_arguments(tokens, np.random.default_rng(0)).tolist() == tokens.tolist()
