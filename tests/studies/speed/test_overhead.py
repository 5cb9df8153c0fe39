"""The engine's steps are timed beside those of a bare loop that does the same."""

import pytest
from torch.testing import assert_close

from nystrom.measure.rows import read_rows
from nystrom.studies.speed import turns
from nystrom.studies.speed.overhead import run_overhead
from nystrom.studies.speed.turns import BareLoop
from nystrom.train.run.trainer import EncoderTrainer


@pytest.mark.parametrize("task", ["listops", "retrieval"])
def test_rows_tell_the_times_of_both_and_of_loading(data, pairs, tmp_path, task):
    folder = {"listops": data, "retrieval": pairs}[task]
    rows = run_overhead(task, preset="demo", data=folder, steps=4, device="cpu", to=tmp_path)
    assert read_rows(tmp_path / "overhead.csv") == rows
    of = {row.quantity.removeprefix(f"{task} "): row for row in rows}
    assert of.keys() == {
        "engine step time",
        "bare step time",
        "loading time",
        "engine step / bare step",
        "loading / bare step",
    }
    assert all(row.repeats == 4 and row.low <= row.value <= row.high for row in rows)
    assert {row.study for row in rows} == {"overhead"}
    assert {row.sizes.split()[-2] for row in rows} == {"b=32" if task == "listops" else "b=16"}


def test_both_loops_train_the_same_model(data, tmp_path, monkeypatch):
    trained = {}
    inner = BareLoop.step

    def step(self, batch):
        trained["bare"] = self.model
        return inner(self, batch)

    init = EncoderTrainer.__init__

    def remember(self, *arguments, **named):
        init(self, *arguments, **named)
        trained["engine"] = self.network

    monkeypatch.setattr(BareLoop, "step", step)
    monkeypatch.setattr(EncoderTrainer, "__init__", remember)
    settle = turns.settle
    monkeypatch.setattr(
        turns, "settle", lambda *a, changes, **named: settle(*a, changes=changes | {"dropout": 0.0}, **named)
    )
    run_overhead("listops", preset="demo", data=data, steps=3, device="cpu", to=tmp_path)
    # The same operations in the same order.
    assert_close(dict(trained["bare"].named_parameters()), dict(trained["engine"].named_parameters()), rtol=0, atol=0)
