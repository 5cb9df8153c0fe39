"""A run: what it leaves, how it goes on, and what it refuses."""

import csv
import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch.testing import assert_close

from nystrom.encoder import EncoderForSequenceClassification
from nystrom.records import read_rows
from nystrom.tasks.lra_listops import ListOps, prepare_listops
from nystrom.train.batches import TrainingOrder
from nystrom.train.data import find_task
from nystrom.train.engine import evaluate, train
from nystrom.train.presets import PRESETS, DataSizes
from nystrom.train.scoring import accuracy, load_model
from nystrom.train.trainer import EncoderTrainer, RunCallback


def weights(run: Path, step: int = 12):
    return load_file(run / f"checkpoint-{step}" / "model.safetensors")


def curves(run: Path):
    with (run / "curves.csv").open(newline="") as file:
        return [(int(row["step"]), row["quantity"], float(row["value"])) for row in csv.DictReader(file)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory, data):
    """An unbroken run, with dropout."""
    to = tmp_path_factory.mktemp("whole") / "run"
    return train(
        "listops", options={"num_landmarks": 8}, preset="demo", data=data, to=to, steps=12, warmup_steps=2,
        batch_size=8, evaluate_every=3, log_every=1, device="cpu",
    )  # fmt: skip


def test_a_run_leaves_its_curves_its_best_model_and_its_rows(whole):
    names = {path.name for path in whole.iterdir()}
    assert names >= {"run.json", "curves.csv", "curves.png", "best", "rows.csv", "checkpoint-12"}
    assert not [name for name in names if "partial" in name]
    assert (whole / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_curves_hold_each_point_once(whole):
    points = curves(whole)
    assert len({(step, quantity) for step, quantity, _ in points}) == len(points)
    steps = {name: [step for step, quantity, _ in points if quantity == name] for _, name, _ in points}
    assert steps == {
        "train loss": list(range(1, 13)),
        "learning rate": list(range(1, 13)),
        "validation loss": [3, 6, 9, 12],
        "validation accuracy": [3, 6, 9, 12],
    }
    rates = [value for _, quantity, value in points if quantity == "learning rate"]
    # Linear from 0 over two steps to the preset's rate, then linear to 0 at the end.
    assert rates == pytest.approx([2e-3 * (i / 2 if i < 2 else (12 - i) / 10) for i in range(12)])


def test_the_best_model_is_the_one_with_the_highest_validation_accuracy(whole, data):
    scored = {step: value for step, quantity, value in curves(whole) if quantity == "validation accuracy"}
    best = max(scored, key=lambda step: (scored[step], -step))
    assert_close(load_file(whole / "best" / "model.safetensors"), weights(whole, best), rtol=0, atol=0)
    row = evaluate("listops", model=whole / "best", data=data, split="val", device="cpu")
    assert row.value == pytest.approx(scored[best])


def test_rows_say_what_was_reached(whole, data):
    rows = {row.quantity: row for row in read_rows(whole / "rows.csv")}
    test = rows["test accuracy"]
    assert test.value == evaluate("listops", model=whole / "best", data=data, device="cpu").value
    assert (test.study, test.method, test.m, test.repeats, test.seed) == ("train listops", "nystrom-8+skip", 8, 30, 0)
    assert test.low is not None
    assert test.low < test.value < test.high
    assert rows["largest class of test"].value == ListOps(data, "test").majority_share
    assert rows["steps"].value == 12
    assert rows["training time"].unit == "s"


def test_tensorboard_gets_the_curves_where_it_is_installed(whole):
    pytest.importorskip("tensorboard")
    assert list(whole.glob("runs/*/events.out.tfevents.*"))


def test_the_score_counts_every_sample_whatever_the_batch(whole, data):
    model, split = load_model(whole / "best", "listops", find_task("listops")), ListOps(data, "test")
    with torch.no_grad():
        right = [
            int(model(torch.as_tensor(split[i]["input_ids"]).long()[None]).logits.argmax()) == split[i]["labels"]
            for i in range(len(split))
        ]
    for batch_size in (1, 7, 64):
        assert accuracy(model, split, batch_size=batch_size, device="cpu", precision="float32") == sum(right) / 30


def test_a_seed_decides_the_run(whole, small_run, tmp_path):
    assert_close(weights(small_run(tmp_path / "same")), weights(whole), rtol=0, atol=0)
    other = weights(small_run(tmp_path / "other", seed=1))
    assert not torch.equal(other["classifier.dense.weight"], weights(whole)["classifier.dense.weight"])


def test_the_order_of_the_samples_is_that_of_the_seed_and_the_whole_batch(small_run, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "nystrom.train.trainer.TrainingOrder", lambda *_, **given: asked.append(given) or TrainingOrder(*_, **given)
    )
    small_run(tmp_path / "run", seed=5, steps=3, accumulation=2)
    assert asked == [{"batch_size": 8, "steps": 3, "seed": 5}]


def test_accumulation_gives_the_run_of_the_whole_batch(small_run, tmp_path):
    one = small_run(tmp_path / "one", dropout=0.0)
    two = small_run(tmp_path / "two", dropout=0.0, accumulation=2)
    # float32 sums in another order, over twelve steps of Adam.
    assert_close(weights(two), weights(one), rtol=1e-3, atol=1e-4)
    assert [value for *_, value in curves(two)] == pytest.approx([value for *_, value in curves(one)], rel=1e-3)


def test_two_processes_give_the_run_of_one(small_run, data, tmp_path):
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
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("test accuracy") == 1
    two = tmp_path / "two"
    # float32 sums in another order, over twelve steps of Adam.
    assert_close(weights(two), weights(one), rtol=1e-3, atol=1e-4)
    for (step, quantity, value), (other_step, other, wanted) in zip(curves(two), curves(one), strict=True):
        assert (step, quantity) == (other_step, other)
        # The last batch of 20 samples is filled up for two processes; what fills it must not count.
        assert value == pytest.approx(wanted, rel=1e-3), (step, quantity)


def test_a_killed_run_goes_on_to_the_result_of_an_unbroken_one(whole, small_run, data, tmp_path):
    script = tmp_path / "killed.py"
    # The process waits in step 8 to be killed; a loaded machine might otherwise finish before it is.
    script.write_text(f"""
import time
from pathlib import Path
from nystrom.train.engine import train
from nystrom.train.trainer import EncoderTrainer
inner = EncoderTrainer.training_step
def training_step(self, *given):
    while self.state.global_step == 7:
        time.sleep(1)
    return inner(self, *given)
EncoderTrainer.training_step = training_step
train("listops", options={{"num_landmarks": 8}}, preset="demo", data=Path({str(data)!r}),
      to=Path({str(tmp_path / "killed")!r}), steps=12, warmup_steps=2, batch_size=8,
      evaluate_every=3, log_every=1, device="cpu", threads=1)
""")
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            deadline = time.monotonic() + 120
            while not (tmp_path / "killed" / "checkpoint-6" / "complete.json").exists():
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.01)
        finally:
            process.send_signal(signal.SIGKILL)
    assert not (tmp_path / "killed" / "best").exists()
    killed = small_run(tmp_path / "killed", resume=True)
    assert_close(weights(killed), weights(whole), rtol=0, atol=0)
    assert curves(killed) == curves(whole)
    best = [load_file(run / "best" / "model.safetensors") for run in (killed, whole)]
    assert_close(best[0], best[1], rtol=0, atol=0)


def test_random_landmarks_survive_an_interruption(small_run, tmp_path, monkeypatch):
    settings = {"attention": "skyformer", "options": {"num_landmarks": 6}}
    whole = small_run(tmp_path / "whole", **settings)
    with monkeypatch.context() as patch:
        interrupt_at(patch, 8)
        with pytest.raises(KeyboardInterrupt):
            small_run(tmp_path / "broken", **settings)
    broken = small_run(tmp_path / "broken", resume=True, **settings)
    assert_close(weights(broken), weights(whole), rtol=0, atol=0)


def interrupt_at(patch, step):
    inner = EncoderTrainer.training_step

    def training_step(self, *arguments, **named):
        if self.state.global_step + 1 == step:
            raise KeyboardInterrupt
        return inner(self, *arguments, **named)

    patch.setattr(EncoderTrainer, "training_step", training_step)


def test_an_interruption_leaves_a_run_that_goes_on(whole, small_run, tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        interrupt_at(patch, 8)
        with pytest.raises(KeyboardInterrupt):
            small_run(tmp_path / "run")
    assert "Stopped in step 8 of 12; go on with --resume, from step 6." in capsys.readouterr().out
    assert [step for step, quantity, _ in curves(tmp_path / "run") if quantity == "train loss"] == [1, 2, 3, 4, 5, 6]
    run = small_run(tmp_path / "run", resume=True)
    assert "Going on after step 6." in capsys.readouterr().out
    assert_close(weights(run), weights(whole), rtol=0, atol=0)
    assert curves(run) == curves(whole)


def test_a_run_that_stopped_before_its_first_checkpoint_starts_again(whole, small_run, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        interrupt_at(patch, 2)
        with pytest.raises(KeyboardInterrupt):
            small_run(tmp_path / "run")
    assert_close(weights(small_run(tmp_path / "run", resume=True)), weights(whole), rtol=0, atol=0)


def test_a_half_written_checkpoint_is_passed_over(whole, small_run, tmp_path, capsys):
    run = small_run(tmp_path / "run")
    last = run / "checkpoint-12" / "model.safetensors"
    os.truncate(last, last.stat().st_size // 2)
    small_run(run, resume=True)
    assert "Going on after step 9." in capsys.readouterr().out
    assert_close(weights(run), weights(whole), rtol=0, atol=0)
    assert curves(run) == curves(whole)


def test_a_finished_run_that_is_resumed_stays_as_it_is(small_run, tmp_path):
    run = small_run(tmp_path / "run")
    before = weights(run), curves(run), len(read_rows(run / "rows.csv"))
    small_run(run, resume=True)
    assert (weights(run).keys(), curves(run), len(read_rows(run / "rows.csv"))) == (before[0].keys(), *before[1:])
    assert_close(weights(run), before[0], rtol=0, atol=0)


def test_a_resumed_run_knows_its_data(whole, small_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patch:
        interrupt_at(patch, 5)
        with pytest.raises(KeyboardInterrupt):
            small_run(tmp_path / "run")
    assert_close(weights(small_run(tmp_path / "run", resume=True, data=None)), weights(whole), rtol=0, atol=0)
    assert not (tmp_path / "data").exists()


def test_a_run_folder_may_move(whole, small_run, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        interrupt_at(patch, 8)
        with pytest.raises(KeyboardInterrupt):
            small_run(tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "moved")
    run = small_run(tmp_path / "moved", resume=True)
    assert_close(
        load_file(run / "best" / "model.safetensors"), load_file(whole / "best" / "model.safetensors"), rtol=0, atol=0
    )


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


def _long_enough(tmp_path, name):
    return prepare_listops(
        tmp_path / f"{name}-data", train=24, val=4, test=4, min_length=5, max_length=41, progress=False
    )


def test_the_best_checkpoint_is_chosen_after_the_share_that_the_preset_says(small_run, tmp_path, monkeypatch):
    monkeypatch.setitem(PRESETS, ("listops", "demo"), dataclasses.replace(PRESETS["listops", "demo"], best_after=0.5))
    falling = iter([0.9, 0.8, 0.3, 0.2])
    inner = EncoderTrainer.__mro__[1].evaluate

    def evaluate(self, *arguments, **named):
        return {**inner(self, *arguments, **named), "eval_accuracy": next(falling)}

    monkeypatch.setattr(EncoderTrainer.__mro__[1], "evaluate", evaluate)
    run = small_run(tmp_path / "run")
    assert {row.quantity: row.value for row in read_rows(run / "rows.csv")}["best step"] == 9


def test_low_precision_trains(small_run, tmp_path):
    run = small_run(tmp_path / "run", precision="bfloat16")
    assert read_rows(run / "rows.csv")[0].dtype == "bfloat16"
    assert all(weight.dtype == torch.float32 for weight in weights(run).values())


def test_data_that_are_missing_are_made_once(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    sizes = DataSizes(folder="listops-demo", train=24, val=6, test=6, min_length=5, max_length=41)
    monkeypatch.setitem(PRESETS, ("listops", "demo"), dataclasses.replace(PRESETS["listops", "demo"], data=sizes))
    for seed in (0, 1):
        train("listops", preset="demo", seed=seed, steps=2, warmup_steps=0, batch_size=8, device="cpu")
    assert (
        capsys.readouterr().out.count("data/listops-demo is not there: preparing 24 + 6 + 6 samples of listops.") == 1
    )
    assert (tmp_path / "runs" / "listops-nystrom-demo-seed1" / "best" / "model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_demo_beats_the_largest_class_by_twelve_points(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = train("listops", preset="demo", device="cpu")
    rows = {row.quantity: row.value for row in read_rows(run / "rows.csv")}
    assert rows["test accuracy"] >= rows["largest class of test"] + 0.12


def test_every_process_has_its_own_dropout(small_run, tmp_path, monkeypatch):
    begin, ends = RunCallback.on_train_begin, []
    for rank in (0, 1):
        # As the process of this rank sees it, where the Trainer begins.
        place = SimpleNamespace(world_size=2, process_index=rank)
        monkeypatch.setattr(
            RunCallback, "on_train_begin", lambda self, _, *rest, at=place, **named: begin(self, at, *rest)
        )
        ends.append(weights(small_run(tmp_path / str(rank), steps=3), 3))
    assert not torch.equal(ends[0]["classifier.dense.weight"], ends[1]["classifier.dense.weight"])


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"preset": "demos"}, "preset 'demos' is unknown"),
        ({"attention": "nystorm"}, "attention 'nystorm' is unknown"),
        (
            {"data": Path("nowhere")},
            "data is nowhere, and there is no such folder.*nystrom data prepare listops --to nowhere",
        ),
        ({"batch_size": 64}, "batch_size is 64 but data .* holds 48 training samples"),
        ({"threads": 0}, "threads is 0"),
        ({"device": "cuda", "precision": "float8"}, "device is 'cuda', but|precision is 'float8'"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_there_is_a_model(small_run, tmp_path, monkeypatch, wrong, says):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(EncoderForSequenceClassification, "__init__", lambda *a: pytest.fail("a model was made"))
    with pytest.raises(ValueError, match=says):
        small_run(tmp_path / "run", **wrong)


def test_an_unknown_task_is_refused():
    with pytest.raises(ValueError, match=r"task 'listop' is unknown.*Perhaps you meant 'listops'"):
        train("listop")


def test_samples_longer_than_the_model_are_refused(small_run, tmp_path):
    long = prepare_listops(tmp_path / "long", train=20, val=4, test=4, min_length=520, max_length=700, progress=False)
    with pytest.raises(ValueError, match=r"data .*long holds a sample of \d+ tokens in train, but the model has 512"):
        small_run(tmp_path / "run", data=long)


def test_a_resumed_run_keeps_its_settings(small_run, tmp_path, data):
    run = small_run(tmp_path / "run", steps=3, warmup_steps=0)
    with pytest.raises(ValueError, match="holds a run: go on with it by --resume"):
        small_run(run)
    with pytest.raises(ValueError, match="steps is 12 but was 3; warmup_steps is 2 but was 0"):
        small_run(run, resume=True)
    other = prepare_listops(
        tmp_path / "other", train=48, val=20, test=30, seed=1, min_length=5, max_length=41, progress=False
    )
    with pytest.raises(ValueError, match="whose data were others"):
        small_run(run, resume=True, steps=3, warmup_steps=0, data=other)


def test_only_models_of_the_task_are_scored(whole, data, tmp_path):
    with pytest.raises(ValueError, match=r"which holds no config.json"):
        evaluate("listops", model=tmp_path, data=data)
    model = EncoderForSequenceClassification.from_pretrained(whole / "best")
    for change, says in (
        ({"task": "text"}, "was trained on text, with 17 tokens and 10 classes; expected listops"),
        ({"model_type": "bert"}, "is of type 'bert'; expected 'nystrom'"),
    ):
        model.save_pretrained(tmp_path / "other")
        config = (tmp_path / "other" / "config.json").read_text()
        for name, value in change.items():
            config = config.replace(f'"{name}": "{getattr(model.config, name)}"', f'"{name}": "{value}"')
        (tmp_path / "other" / "config.json").write_text(config)
        with pytest.raises(ValueError, match=says):
            evaluate("listops", model=tmp_path / "other", data=data)


def test_only_safetensors_that_fit_are_read(whole, data, tmp_path):
    model = EncoderForSequenceClassification.from_pretrained(whole / "best")
    model.save_pretrained(tmp_path)
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('"num_hidden_layers": 2', '"num_hidden_layers": 3'))
    with pytest.raises(ValueError, match=r"does not fit its config.json, for example in nystromformer.encoder.layer.2"):
        evaluate("listops", model=tmp_path, data=data, device="cpu")
    (tmp_path / "config.json").write_text(config)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"holds no model.safetensors: only that format is read"):
        evaluate("listops", model=tmp_path, data=data, device="cpu")


def test_a_split_that_is_none_is_refused(whole, data):
    with pytest.raises(ValueError, match="split must be one of train, val, test"):
        evaluate("listops", model=whole / "best", data=data, split="dev", device="cpu")
