"""The guide's table of masks beyond padding: which methods take each, and what the others say."""

import re
from pathlib import Path

import pytest
import torch

from nystrom import Alibi
from nystrom.attention.functions import FUNCTIONS
from nystrom.attention.registry import METHODS

PAGE = Path(__file__).parents[1] / "docs" / "use-it-with-your-model.md"
VALUES = {
    "is_causal": True,
    "cu_seqlens": torch.tensor([0, 12, 20]),
    "key_keep": torch.ones(1, 20, dtype=torch.bool),
    "query_keep": torch.ones(1, 20, dtype=torch.bool),
    "window": 5,
    "num_global": 2,
    "block_size": 4,
    "reach": 2,
    "num_random_blocks": 1,
    "attn_mask": torch.ones(20, 20, dtype=torch.bool),
    "attn_bias": torch.zeros(20, 20),
    "bias": Alibi(torch.ones(2)),
    "dropout_p": 0.1,
}


def table():
    section = PAGE.read_text(encoding="utf-8").partition("## Masks beyond padding\n")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return [[*row, ""][:4] for row in rows[1:]]


def options_of(cell):
    return re.findall(r"`(\w+)(?:=True)?`", cell)


def methods(cell):
    named = set(re.findall(r"`(\w+)`", cell))
    return set(METHODS) - named if cell.startswith("all") else named


@pytest.mark.refuses
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("row", table(), ids=lambda row: row[0][:20])
def test_a_method_takes_the_masks_that_the_table_says_and_raises_for_others_with_the_way_out(row, name):
    _, able, how, way_out = row
    q, k, v = (torch.randn(1, 2, 20, 8) for _ in range(3))
    weights = (torch.randn(1, 4, 20), torch.randn(1, 4, 20)) if name == "linformer" else ()
    options = {option: VALUES[option] for option in options_of(how)}
    function = FUNCTIONS[name]
    if name in methods(able):
        assert function(q, k, v, *weights, **options).shape == q.shape
        return
    says = re.findall(r"`([\w.]+)`", way_out)
    with pytest.raises(ValueError, match=says[0] if says else "argument"):
        function(q, k, v, *weights, **options)


def test_the_table_has_every_mask():
    assert len(table()) == 10
    assert {name for row in table() for name in options_of(row[2])} == set(VALUES)
