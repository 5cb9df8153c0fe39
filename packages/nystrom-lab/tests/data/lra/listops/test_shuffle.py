"""Arguments in another order leave an expression what it was, and all orders are equally likely."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nystrom_lab.data.lra.listops import expressions


def tokens_of(text):
    return np.array([expressions.VOCABULARY.index(word) for word in text.split()], dtype=np.uint8)


def text_of(tokens):
    return " ".join(expressions.VOCABULARY[token] for token in tokens)


@given(st.integers(0, 2**32), st.integers(0, 2**32))
def test_the_value_and_the_tokens_stay(seed, other):
    limits = expressions.Limits(min_length=0, max_length=120, max_depth=6, max_args=5)
    drawn = expressions.draw_expressions(np.random.default_rng(seed), 20, limits)
    for start, stop, label in zip(drawn.offsets, drawn.offsets[1:], drawn.labels, strict=False):
        tokens = drawn.tokens[start:stop]
        shuffled = expressions.shuffle_arguments(tokens, np.random.default_rng(other))
        assert shuffled.dtype == tokens.dtype
        assert expressions.is_expression(shuffled)
        assert expressions.evaluate_expressions(shuffled).tolist() == [label]
        assert Counter(shuffled.tolist()) == Counter(tokens.tolist())


def test_each_order_is_as_likely_as_another_and_arguments_stay_whole():
    tokens = tokens_of("[MAX 1 [SM 2 3 X 4 X")
    seen = Counter(text_of(expressions.shuffle_arguments(tokens, np.random.default_rng(seed))) for seed in range(2400))
    # 3! orders outside, 2 inside.
    assert len(seen) == 12
    assert all("[SM 2 3 X" in text or "[SM 3 2 X" in text for text in seen)
    # 200 expected; five standard deviations of a binomial count are 68.
    assert min(seen.values()) > 132
    assert max(seen.values()) < 268


@pytest.mark.parametrize("text", ["7", "[MIN 3 X"])
def test_what_has_one_order_stays(text):
    tokens = tokens_of(text)
    assert expressions.shuffle_arguments(tokens, np.random.default_rng(0)).tolist() == tokens.tolist()
