"""Two choices are timed in turn, and their rows record by how much they differ."""

import importlib.util

import pytest

from nystrom_lab.measure.rows import read_rows
from tools.compare_steps import compare_dropout, compare_formats, compare_heads, in_turn, main

HAS_DATASETS = importlib.util.find_spec("datasets") is not None
SMALL = {"layers": 1, "width": 8, "batch": 2, "tokens": 32, "vocabulary": 50, "rounds": 3}
SHORT = {"samples": 12, "batch": 4, "min_length": 5, "max_length": 40, "loads": 1, "rounds": 2}


def test_the_order_changes_from_round_to_round_and_the_first_round_is_not_timed():
    seen, now = [], 0.0

    def call(name, seconds):
        def run():
            nonlocal now
            seen.append(name)
            now += seconds

        return run

    found = in_turn({"a": call("a", 2.0), "b": call("b", 1.0)}, rounds=3, clock=lambda: now)
    assert found == {"a": [2.0] * 3, "b": [1.0] * 3}
    assert seen == ["b", "a", "a", "b", "b", "a", "a", "b"]


def test_scoring_all_tokens_is_compared_with_scoring_the_masked_ones(tmp_path, capsys):
    rows = compare_heads(to=tmp_path / "rows.csv", **SMALL)
    assert read_rows(tmp_path / "rows.csv") == rows
    for model in ("masked LM", "pretraining"):
        every, masked, ratio = (row for row in rows if row.quantity.startswith(f"{model} training step time, "))
        assert (every.unit, masked.unit, ratio.unit) == ("ms", "ms", "")
        assert ratio.quantity.endswith("all tokens scored / masked tokens scored")
        assert all(row.low <= row.value <= row.high and row.repeats == 3 and row.n == 32 for row in (every, ratio))
    assert rows[0].command == (
        "python tools/compare_steps.py heads --layers 1 --width 8 --batch 2 --tokens 32 --vocabulary 50 --rounds 3"
    )
    assert len(capsys.readouterr().out.splitlines()) == len(rows) == 6


def test_a_classifier_is_compared_with_itself_under_the_dropout_of_torch(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr("nystrom.models.parts.dropout.dropout", lambda x, share: seen.append(share) or x)
    monkeypatch.setattr("torch.nn.Dropout.forward", lambda self, x: seen.append("torch") or x)
    rows = compare_dropout(to=tmp_path / "rows.csv", tokens=24, batch=2, rounds=1)
    # As many calls of one as of the other.
    assert 2 * seen.count("torch") == len(seen) > 0
    assert [row.quantity for row in rows] == [
        f"training step time, {what}"
        for what in (
            "nystrom.models.parts.dropout",
            "torch.nn.Dropout",
            "nystrom.models.parts.dropout / torch.nn.Dropout",
        )
    ]
    assert rows[0].command == "python tools/compare_steps.py dropout --tokens 24 --batch 2 --rounds 1"


@pytest.mark.skipif(not HAS_DATASETS, reason="datasets is not installed")
def test_our_folders_are_compared_with_arrow(tmp_path):
    rows = compare_formats(to=tmp_path / "rows.csv", **SHORT)
    assert [row.quantity for row in rows] == [
        f"{what}, {choice}"
        for what in ("loading time of a batch", "training step time, loading included")
        for choice in ("Arrow", "prepared folder", "Arrow / prepared folder")
    ]
    assert all(" datasets=" in row.words and row.value > 0 for row in rows)


@pytest.mark.skipif(HAS_DATASETS, reason="datasets is installed")
def test_without_datasets_the_way_out_is_named(tmp_path):
    with pytest.raises(ValueError, match="pip install datasets"):
        compare_formats(to=tmp_path / "rows.csv", **SHORT)


def test_a_mistake_ends_in_one_line(tmp_path, capsys):
    (tmp_path / "rows.csv").touch()
    assert main(["heads", "--to", str(tmp_path / "rows.csv")]) == 2
    assert capsys.readouterr().err == f"compare_steps: {tmp_path}/rows.csv exists: name another file in --to.\n"
    assert main(["heads", "--to", str(tmp_path / "other.csv"), "--rounds", "0"]) == 2
    assert "rounds is 0" in capsys.readouterr().err
