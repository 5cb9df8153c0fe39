"""The small model of tables: it is trained, asked and timed, and a context with room for each row changes nothing."""

import sys

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from nystrom_lab.measure.rows import read_rows
from tools.table_model import TableModel, attend_by_context, draw_tasks, main


def run(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["tools/table_model.py", *map(str, words)])
    main()


@pytest.fixture
def weights(tmp_path, monkeypatch):
    run(monkeypatch, "train", "--steps", 2, "--to", tmp_path / "tables.safetensors")
    return tmp_path / "tables.safetensors"


@torch.inference_mode()
def test_a_context_with_a_heavy_key_for_each_row_predicts_as_exact_attention():
    torch.manual_seed(0)
    model, (x, y) = TableModel().eval(), draw_tasks(2, 60, np.random.default_rng(0))
    expected = model(x, y, 40)
    # float32 rounding of softmax over entries in another order, through three layers.
    assert_close(
        model(x, y, 40, lambda q, k, v: attend_by_context(q, k, v, entries=6 * 40)), expected, rtol=1e-4, atol=1e-5
    )


@torch.inference_mode()
def test_labels_of_rows_that_are_asked_are_not_seen():
    model, (x, y) = TableModel().eval(), draw_tasks(1, 60, np.random.default_rng(0))
    hidden = torch.cat([y[:, :40], 1 - y[:, 40:]], dim=1)
    assert torch.equal(model(x, y, 40), model(x, hidden, 40))


def test_the_ways_are_compared_on_the_same_tasks(weights, tmp_path, monkeypatch):
    words = ["--model", weights, "--rows", 64, "--entries", 12, "--to", tmp_path / "rows.csv"]
    run(monkeypatch, "ask", *words, "--tasks", 2)
    found = {(row.method, row.quantity): row for row in read_rows(tmp_path / "rows.csv")}
    assert {method for method, _ in found} == {"exact", "context-12", "rows-12"}
    assert found["exact", "mean change of p"].value == 0 < found["rows-12", "mean change of p"].value
    assert {row.repeats for row in found.values()} == {2}
    run(monkeypatch, "sharp", *words)
    errors = [row for row in read_rows(tmp_path / "rows.csv") if row.quantity == "error of a head's attention"]
    assert [(row.facts["factor"], row.m) for row in errors] == [
        (factor, m) for factor in ["1", "5", "30"] for m in (12, 48)
    ]


def test_a_layer_of_tabpfn_is_timed_with_its_cache_and_the_context(tmp_path, monkeypatch):
    pytest.importorskip("tabpfn.architectures")
    run(monkeypatch, "time", "--rows", 9000, "--entries", 12, "--turns", 1, "--to", tmp_path / "rows.csv")
    found = {(row.dtype, row.quantity): row.value for row in read_rows(tmp_path / "rows.csv")}
    # A cached row has two vectors of 64 numbers; an entry the same in float32, and the number of its rows in 8 bytes.
    entries = 12 * (2 * 64 * 4 + 8)
    for dtype, size in (("float32", 4), ("int8", 1)):
        assert found[dtype, "bytes of the cache / of the context"] == pytest.approx(9000 * 2 * 64 * size / entries)


def test_weights_are_not_written_over(weights, monkeypatch):
    before = weights.read_bytes()
    with pytest.raises(ValueError, match="exists"):
        run(monkeypatch, "train", "--steps", 2, "--to", weights)
    assert weights.read_bytes() == before
