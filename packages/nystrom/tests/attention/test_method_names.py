"""A number after a method's name is its size, by the same rule for every command."""

from dataclasses import fields

import pytest

from nystrom.attention.method_names import (
    SIZES,
    near_far_keys,
    read_method,
    reformer_buckets,
    sized_name,
    split_name,
)
from nystrom.attention.registry import METHODS


@pytest.mark.parametrize(
    ("name", "method", "options"),
    [
        ("softmax", "softmax", {}),
        ("nystrom", "nystrom", {}),
        ("nystrom-64", "nystrom", {"num_landmarks": 64}),
        ("skyformer_softmax-32", "skyformer_softmax", {"num_landmarks": 32}),
        ("linformer-128", "linformer", {"num_features": 128}),
        ("informer-16", "informer", {"num_queries": 16, "num_samples": 16}),
        ("near_far", "near_far", {"exact_up_to": 0}),
        ("near_far-128", "near_far", {"num_heavy": 128, "num_clusters": 128, "exact_up_to": 0}),
        ("longformer-33", "longformer", {"window": 33}),
    ],
)
def test_a_number_sets_the_size(name, method, options):
    assert read_method(name) == (method, options)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nystorm-64", "method 'nystorm' is unknown.*Perhaps you meant 'nystrom'"),
        ("softmax-64", "method 'softmax-64' ends in a number, but 'softmax' takes none"),
        ("nystrom-0", "method 'nystrom-0' has 0 landmarks; expected at least 1"),
        ("nystrom-", "method 'nystrom-' is unknown"),
    ],
)
def test_a_name_that_is_none_raises(name, says):
    with pytest.raises(ValueError, match=says):
        read_method(name)


def test_sizes_are_options_of_their_methods():
    for method, (options, _) in SIZES.items():
        assert set(options) <= {field.name for field in fields(METHODS[method].options)}


def test_rows_name_the_size_that_a_method_has():
    assert sized_name("nystrom", {"num_landmarks": 32}) == ("nystrom-32", 32)
    assert sized_name("nystrom", {}) == ("nystrom-64", 64)
    assert sized_name("softmax", {}) == ("softmax", None)
    assert sized_name("near_far", {"num_heavy": 32, "num_clusters": 32, "exact_up_to": 0}) == ("near_far-32", 32)


def test_a_method_of_two_sizes_that_differ_has_no_number():
    assert sized_name("near_far", {}) == ("near_far", None)
    assert sized_name("informer", {"num_queries": 8}) == ("informer", None)


def test_a_name_is_its_number():
    assert split_name("nystrom-32") == ("nystrom", 32)


def test_reformer_has_two_buckets_a_chunk():
    assert [reformer_buckets(n) for n in (1, 64, 65, 1_024, 2_000)] == [2, 2, 4, 32, 64]


@pytest.mark.parametrize("number", [8, 16, 64, 256])
def test_near_far_sees_as_many_keys_as_are_asked_for(number):
    options = near_far_keys(number)
    # The window of a block reaches to both sides.
    assert sum(options.values()) + options["reach"] == number
    assert options["exact_up_to"] == 0
    METHODS["near_far"].options(**options)
