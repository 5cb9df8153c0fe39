"""A step: equal for one process and two, an error if a number is not finite, and clipping."""

from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close

from nystrom.models import EncoderForSequenceClassification
from nystrom_lab.config import EvaluateOptions
from nystrom_lab.data.lra.listops.task import ListOps, prepare_listops
from nystrom_lab.measure.rows import read_rows
from nystrom_lab.training.batches import TrainingOrder
from nystrom_lab.training.run_trainer import RunCallback
from nystrom_lab.training.scoring import evaluate


@pytest.mark.long
def test_accumulation_gives_the_run_of_the_whole_batch(small_run, tmp_path, weights, curves):
    one = small_run(tmp_path / "one", dropout=0.0)
    two = small_run(tmp_path / "two", dropout=0.0, accumulation=2)
    # float32 sums in another order, over twelve steps of Adam.
    assert_close(weights(two), weights(one), rtol=1e-3, atol=1e-4)
    assert [value for *_, value in curves(two)] == pytest.approx([value for *_, value in curves(one)], rel=1e-3)


@pytest.mark.long
@pytest.mark.parametrize(("accumulation", "part"), [(1, 8), (4, 2), (8, 1)])
def test_evaluation_takes_no_more_samples_at_a_time_than_a_step(
    small_run, data, tmp_path, after_forward, accumulation, part
):
    sizes = {True: [], False: []}
    after_forward(
        EncoderForSequenceClassification,
        lambda model, inputs, _: sizes[model.training].append(len(inputs["input_ids"])),
    )
    run = small_run(tmp_path / "run", steps=3, dropout=0.0, accumulation=accumulation)
    assert {*sizes[True]} == {part} == {max(sizes[False])}
    # The 20 samples of the one evaluation, and the 30 of the test, each once.
    assert sum(sizes[False]) == 20 + 30
    tested = read_rows(run / "rows.csv")[0]
    assert (tested.quantity, tested.repeats) == ("test accuracy", 30)
    assert (
        tested.value
        == evaluate(EvaluateOptions("listops", model=run / "best", data=data, batch_size=30, device="cpu")).value
    )


def test_the_order_of_the_samples_is_that_of_the_seed_and_the_whole_batch(small_run, data, tmp_path, after_forward):
    seen = []
    after_forward(
        EncoderForSequenceClassification,
        lambda model, inputs, _: seen.extend(inputs["attention_mask"].sum(1)) if model.training else None,
    )
    small_run(tmp_path / "run", seed=5, steps=3, accumulation=2)
    lengths = ListOps(data, "train").lengths
    assert seen == [lengths[i] for i in TrainingOrder(lengths, batch_size=8, steps=3, seed=5)]


# A collection that ends threads of the group holds Python's lock while it waits for them, which may be for ever.
COLLECTING = """
import gc
from pathlib import Path
from nystrom_lab.cli.main import main

def threads():
    return sum("gloo" in name.read_text() for name in Path("/proc/self/task").glob("*/comm"))

def collect(*generation, collect=gc.collect):
    before, found = threads(), collect(*generation)
    assert threads() == before, "threads of the group ended in a collection"
    return found

gc.collect = collect
assert main() == 0
assert threads() == 0
"""


@pytest.mark.long
def test_two_processes_give_the_run_of_one(small_run, data, torchrun, demo_words, tmp_path, same_run):
    one = small_run(tmp_path / "one", dropout=0.0)
    script = tmp_path / "two.py"
    script.write_text(COLLECTING)
    words = ["train", "listops", *demo_words, "--data", data, "--to", tmp_path / "two"]
    done = torchrun(2, *words, script=script)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("test accuracy") == 1
    # The last batch of 20 samples is filled up for two processes; the added samples must not count.
    same_run(tmp_path / "two", one)


def test_every_process_has_its_own_dropout():
    trainer = SimpleNamespace(restart_clock=lambda: None, settings=SimpleNamespace(seed=0))
    draws = []
    for rank in (0, 1):
        torch.manual_seed(0)
        RunCallback(trainer).on_train_begin(SimpleNamespace(world_size=2, process_index=rank), None, None)
        draws.append(torch.rand(9))
    assert not torch.equal(*draws)


def test_a_loss_that_is_not_finite_stops_the_run(small_run, tmp_path, after_forward):
    calls = []

    def spoil(model, _, output):
        calls.extend([None] if model.training else [])
        return output if len(calls) < 8 else type(output)(loss=output.loss * torch.nan, logits=output.logits)

    after_forward(EncoderForSequenceClassification, spoil)
    good = tmp_path / "run" / "checkpoint-6"
    with pytest.raises(FloatingPointError, match=f"the loss is nan at step 8 of 12; the last good .* is {good}"):
        small_run(tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoint-9").exists()


def test_weights_that_are_not_finite_are_not_saved(small_run, tmp_path, around_step):
    steps = []

    def spoil(weights):
        steps.append(None)
        if len(steps) == 6:
            weights[0].data[3] = torch.inf

    around_step(after=spoil)
    good = tmp_path / "run" / "checkpoint-3"
    with pytest.raises(FloatingPointError, match=f"not finite after step 6; the last good checkpoint is {good}"):
        small_run(tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoint-6").exists()


@pytest.mark.long
def test_gradients_are_clipped_by_value_if_the_preset_does(small_run, tmp_path, after_forward, around_step):
    largest = {}

    def note(weights):
        largest.setdefault(name, []).append(max(float(w.grad.abs().max()) for w in weights if w.grad is not None))

    around_step(before=note)
    # Gradients are scaled by a thousand.
    after_forward(
        EncoderForSequenceClassification,
        lambda model, _, output: type(output)(loss=1000 * output.loss, logits=output.logits),
    )
    for name in ("nystromformer", "skyformer"):
        small_run(tmp_path / name, preset=name, steps=3, data=_short_samples(tmp_path / f"{name}-data"))
    assert max(largest["skyformer"]) == 1
    assert min(largest["nystromformer"]) > 1


@pytest.mark.long
def test_the_best_checkpoint_is_chosen_after_the_share_that_the_preset_sets(small_run, tmp_path, after_forward):
    # Four samples in each evaluation, with fewer and fewer classified correctly.
    right = iter([4, 3, 2, 1, 0, 0])

    def judge(model, inputs, output):
        if model.training or (count := next(right, None)) is None:
            return output
        classes = inputs["labels"] + (torch.arange(4) >= count)
        return type(output)(loss=output.loss, logits=torch.eye(10)[classes % 10])

    after_forward(EncoderForSequenceClassification, judge)
    # The first evaluation is within a fifth of the steps.
    run = small_run(tmp_path / "run", preset="skyformer", data=_short_samples(tmp_path / "data"), evaluate_every=2)
    assert {row.quantity: row.value for row in read_rows(run / "rows.csv")}["best step"] == 4


def test_low_precision_trains(small_run, tmp_path, weights):
    run = small_run(tmp_path / "run", precision="bfloat16")
    assert read_rows(run / "rows.csv")[0].dtype == "bfloat16"
    assert all(weight.dtype == torch.float32 for weight in weights(run).values())


def _short_samples(folder):
    return prepare_listops(folder, train=24, val=4, test=4, min_length=5, max_length=41)
