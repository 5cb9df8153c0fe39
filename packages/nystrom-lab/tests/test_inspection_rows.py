"""The rows of an inspection hold its numbers."""

from dataclasses import replace

import pytest
import torch
from transformers import BertConfig, BertModel

from nystrom.inspection import inspect_model
from nystrom.inspection.times import Times
from nystrom_lab.inspection import inspection_rows
from nystrom_lab.report.inspection import ENTROPY, ERROR, HIDDEN, RATIO, RESIDUAL, TIME, VARIATION, layer_and_head


@pytest.fixture
def bert():
    """A random BERT in float64 whose attention is far from uniform."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    config = BertConfig(vocab_size=40, max_position_embeddings=64, initializer_range=0.3, **sizes)
    return BertModel(config).double().eval()


@pytest.fixture
def batch():
    """Two sequences, one of them padded."""
    ids = torch.randint(40, (2, 30), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "attention_mask": (torch.arange(30) < torch.tensor([[30], [19]])).long()}


def test_each_number_has_its_row(bert, batch):
    inspection = inspect_model(bert, [batch], methods=["nystrom-4", "linear"], num_queries=12)
    rows = inspection_rows(inspection)
    layer = inspection.layers[1].methods["nystrom-4"]
    (row,) = (
        row for row in rows if (row.quantity, row.method) == (ERROR, "nystrom-4") and layer_and_head(row) == (1, 2)
    )
    assert (row.value, row.low, row.high) == pytest.approx([float(end[2]) for end in layer.error])
    assert (row.m, row.n, row.dtype, row.repeats, row.study) == (4, 30, "float64", 2, "inspect")
    counts = {quantity: sum(row.quantity == quantity for row in rows) for quantity in (ERROR, VARIATION, RESIDUAL)}
    # Two layers of four heads; linear has neither rows nor an inverse.
    assert counts == {ERROR: 16, VARIATION: 8, RESIDUAL: 8}
    assert sum(row.quantity == ENTROPY for row in rows) == 8
    assert {row.method for row in rows if row.quantity == TIME} == {"nystrom-4", "linear", "softmax"}


def test_times_have_their_quartiles_and_ratios_within_the_turns(bert, batch):
    inspection = inspect_model(bert, [batch], methods=["nystrom-4"], whole_model=False)
    inspection = replace(inspection, times=Times({"nystrom-4": [1.0, 2.0, 30.0], "softmax": [2.0, 8.0, 60.0]}))
    rows = inspection_rows(inspection)
    (time,) = (row for row in rows if (row.quantity, row.method) == (TIME, "nystrom-4"))
    assert (time.value, time.low, time.high, time.unit, time.repeats) == (2000, 1500, 16000, "ms", 3)
    (ratio,) = (row for row in rows if (row.quantity, row.method) == (RATIO, "nystrom-4"))
    assert (ratio.value, ratio.low, ratio.high, ratio.repeats, ratio.words) == (0.5, 0.375, 0.5, 3, "beside=softmax")


def test_a_model_with_exact_attention_where_it_is_badly_served_has_its_own_row(bert, batch):
    inspection = inspect_model(bert, [batch], methods=["nystrom-20", "nystrom-4"], num_queries=30)
    assert inspection.mended, "no method has a large error in some layers alone: choose another for this test"
    for name, (layers, mended) in inspection.mended.items():
        badly = [layer.layer for layer in inspection.layers if layer.methods[name].error.mean > 0.3]
        assert list(layers) == badly
        (row,) = (
            row for row in inspection_rows(inspection) if (row.quantity, row.method) == (HIDDEN, name) and row.words
        )
        assert row.words == "exact=" + ",".join(map(str, layers))
        assert row.value == mended.error < inspection.whole[name].error
