"""The engine's steps are timed in turn with those of a bare loop that does the same."""

import pytest
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.testing import assert_close

from nystrom.models import EncoderForSequenceClassification
from nystrom_lab.bench.overhead import run_overhead
from nystrom_lab.measure.rows import read_rows


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
    assert {row.words.split()[-2] for row in rows} == {"b=32" if task == "listops" else "b=16"}


def test_both_loops_train_the_same_model(data, tmp_path, after_forward, hooks):
    trained = {}
    after_forward(EncoderForSequenceClassification, lambda model, *_: trained.setdefault(id(model), model) and None)
    # With dropout each model would have its own draws.
    hooks.enter_context(
        register_module_forward_hook(lambda part, given, _: given[0] if isinstance(part, nn.Dropout) else None)
    )
    run_overhead("listops", preset="demo", data=data, steps=3, device="cpu", to=tmp_path)
    one, other = trained.values()
    # The same operations in the same order.
    assert_close(dict(one.named_parameters()), dict(other.named_parameters()), rtol=0, atol=0)
