"""What a step does: the same for one process or two, nothing where a number is not finite, and clipping."""

import dataclasses
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from torch.testing import assert_close

from nystrom.measure.rows import read_rows
from nystrom.models import EncoderForSequenceClassification
from nystrom.tasks.lra.listops.task import prepare_listops
from nystrom.train.data.batches import TrainingOrder
from nystrom.train.engine import evaluate
from nystrom.train.presets.published import PRESETS
from nystrom.train.run.trainer import EncoderTrainer, RunCallback


def test_accumulation_gives_the_run_of_the_whole_batch(small_run, tmp_path, weights, curves):
    one = small_run(tmp_path / "one", dropout=0.0)
    two = small_run(tmp_path / "two", dropout=0.0, accumulation=2)
    # float32 sums in another order, over twelve steps of Adam.
    assert_close(weights(two), weights(one), rtol=1e-3, atol=1e-4)
    assert [value for *_, value in curves(two)] == pytest.approx([value for *_, value in curves(one)], rel=1e-3)


@pytest.mark.parametrize(("accumulation", "part"), [(1, 8), (4, 2), (8, 1)])
def test_evaluation_takes_no_more_samples_at_a_time_than_a_step(
    small_run, data, tmp_path, monkeypatch, accumulation, part
):
    sizes, inner = {True: [], False: []}, EncoderForSequenceClassification.forward

    def forward(self, input_ids, *arguments, **named):
        sizes[self.training].append(len(input_ids))
        return inner(self, input_ids, *arguments, **named)

    monkeypatch.setattr(EncoderForSequenceClassification, "forward", forward)
    run = small_run(tmp_path / "run", steps=3, dropout=0.0, accumulation=accumulation)
    assert {*sizes[True]} == {part} == {max(sizes[False])}
    # The 20 samples of the one evaluation, and the 30 of the test, each once.
    assert sum(sizes[False]) == 20 + 30
    tested = read_rows(run / "rows.csv")[0]
    assert (tested.quantity, tested.repeats) == ("test accuracy", 30)
    assert tested.value == evaluate("listops", model=run / "best", data=data, batch_size=30, device="cpu").value


def test_the_order_of_the_samples_is_that_of_the_seed_and_the_whole_batch(small_run, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "nystrom.train.run.trainer.TrainingOrder", lambda *_, **given: asked.append(given) or TrainingOrder(*_, **given)
    )
    small_run(tmp_path / "run", seed=5, steps=3, accumulation=2)
    assert asked == [{"batch_size": 8, "steps": 3, "seed": 5}]


def test_two_processes_give_the_run_of_one(small_run, data, tmp_path, weights, curves):
    one = small_run(tmp_path / "one", dropout=0.0)
    script = tmp_path / "two.py"
    script.write_text(f"""
from pathlib import Path
from nystrom.train.engine import train
train("listops", options={{"num_landmarks": 8}}, preset="demo", data=Path({str(data)!r}),
      to=Path({str(tmp_path / "two")!r}), steps=12, warmup_steps=2, batch_size=8,
      evaluate_every=3, log_every=1, dropout=0.0, device="cpu", threads=1)
""")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("test accuracy") == 1
    two = tmp_path / "two"
    # float32 sums in another order, over twelve steps of Adam.
    assert_close(weights(two), weights(one), rtol=1e-3, atol=1e-4)
    for (step, quantity, value), (other_step, other, wanted) in zip(curves(two), curves(one), strict=True):
        assert (step, quantity) == (other_step, other)
        # The last batch of 20 samples is filled up for two processes; what fills it must not count.
        assert value == pytest.approx(wanted, rel=1e-3), (step, quantity)


def test_every_process_has_its_own_dropout(small_run, tmp_path, monkeypatch, weights):
    begin, ends = RunCallback.on_train_begin, []
    for rank in (0, 1):
        # As the process of this rank sees it, where the Trainer begins.
        place = SimpleNamespace(world_size=2, process_index=rank)
        monkeypatch.setattr(
            RunCallback, "on_train_begin", lambda self, _, *rest, at=place, **named: begin(self, at, *rest)
        )
        ends.append(weights(small_run(tmp_path / str(rank), steps=3), 3))
    assert not torch.equal(ends[0]["classifier.dense.weight"], ends[1]["classifier.dense.weight"])


def test_a_loss_that_is_not_finite_stops_the_run(small_run, tmp_path, monkeypatch):
    inner = EncoderForSequenceClassification.forward
    calls = []

    def forward(self, *arguments, **named):
        out = inner(self, *arguments, **named)
        calls.extend([None] if self.training else [])
        return out if len(calls) < 8 else type(out)(loss=out.loss * torch.nan, logits=out.logits)

    monkeypatch.setattr(EncoderForSequenceClassification, "forward", forward)
    good = tmp_path / "run" / "checkpoint-6"
    with pytest.raises(
        FloatingPointError, match=f"the loss is nan at step 8 of 12; the last good checkpoint is {good}"
    ):
        small_run(tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoint-9").exists()


def test_weights_that_are_not_finite_are_not_saved(small_run, tmp_path, monkeypatch):
    inner, steps = torch.optim.AdamW.step, []

    def step(self, *arguments, **named):
        inner(self, *arguments, **named)
        steps.append(None)
        if len(steps) == 6:
            self.param_groups[0]["params"][0].data[3] = torch.inf

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    good = tmp_path / "run" / "checkpoint-3"
    with pytest.raises(FloatingPointError, match=f"not finite after step 6; the last good checkpoint is {good}"):
        small_run(tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoint-6").exists()


def test_gradients_are_clipped_by_value_where_the_preset_says_so(small_run, tmp_path, monkeypatch):
    largest = {}
    inner = torch.optim.AdamW.step

    def step(self, *arguments, **named):
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        largest.setdefault(name, []).append(max(float(g.abs().max()) for g in gradients))
        return inner(self, *arguments, **named)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    # Gradients a thousand times as large as they are.
    backward = Accelerator.backward
    monkeypatch.setattr(Accelerator, "backward", lambda self, loss, **named: backward(self, 1000 * loss, **named))
    short = {"steps": 3, "data": None}
    for name in ("nystromformer", "skyformer"):
        short["data"] = _long_enough(tmp_path, name)
        small_run(tmp_path / name, preset=name, **short)
    assert max(largest["skyformer"]) == 1
    assert min(largest["nystromformer"]) > 1


def test_the_best_checkpoint_is_chosen_after_the_share_that_the_preset_says(small_run, tmp_path, monkeypatch):
    monkeypatch.setitem(PRESETS, ("listops", "demo"), dataclasses.replace(PRESETS["listops", "demo"], best_after=0.5))
    falling = iter([0.9, 0.8, 0.3, 0.2])
    inner = EncoderTrainer.__mro__[1].evaluate

    def evaluate(self, *arguments, **named):
        return {**inner(self, *arguments, **named), "eval_accuracy": next(falling)}

    monkeypatch.setattr(EncoderTrainer.__mro__[1], "evaluate", evaluate)
    run = small_run(tmp_path / "run")
    assert {row.quantity: row.value for row in read_rows(run / "rows.csv")}["best step"] == 9


def test_low_precision_trains(small_run, tmp_path, weights):
    run = small_run(tmp_path / "run", precision="bfloat16")
    assert read_rows(run / "rows.csv")[0].dtype == "bfloat16"
    assert all(weight.dtype == torch.float32 for weight in weights(run).values())


def _long_enough(tmp_path, name):
    return prepare_listops(
        tmp_path / f"{name}-data", train=24, val=4, test=4, min_length=5, max_length=41, progress=False
    )
