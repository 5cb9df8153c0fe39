"""The files that a run leaves, and the errors before a model is made."""

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close

from nystrom.models import EncoderForSequenceClassification
from nystrom_lab.config import EvaluateOptions
from nystrom_lab.data.lra.listops.task import ListOps, first_operator_share, prepare_listops
from nystrom_lab.measure.rows import read_rows
from nystrom_lab.training.arena import EncoderTrainer
from nystrom_lab.training.presets import PRESETS, DataSizes
from nystrom_lab.training.run_settings import train_options
from nystrom_lab.training.scoring import evaluate
from nystrom_lab.training.train import train
from nystrom_papers.report.lra.runs import FIRST_OPERATOR


def test_a_run_leaves_its_curves_its_best_model_and_its_rows(whole):
    names = {path.name for path in whole.iterdir()}
    assert names >= {"run.json", "curves.csv", "curves.png", "best", "rows.csv", "checkpoint-12"}
    assert not [name for name in names if "partial" in name]
    assert (whole / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_curves_hold_each_point_once(whole, curves):
    points = curves(whole)
    assert len({(step, quantity) for step, quantity, _ in points}) == len(points)
    steps = {name: [step for step, quantity, _ in points if quantity == name] for _, name, _ in points}
    each = {name: [*range(1, 13)] for name in ("train loss", "learning rate", "gradient norm")}
    assert steps == each | {f"validation {name}": [3, 6, 9, 12] for name in ("loss", "accuracy")}
    rates = [value for _, quantity, value in points if quantity == "learning rate"]
    # Linear from 0 over two steps to the preset's rate, then linear to 0 at the end.
    assert rates == pytest.approx([2e-3 * (i / 2 if i < 2 else (12 - i) / 10) for i in range(12)])


def test_the_best_model_is_the_one_with_the_highest_validation_accuracy(whole, data, weights, curves):
    scored = {step: value for step, quantity, value in curves(whole) if quantity == "validation accuracy"}
    best = max(scored, key=lambda step: (scored[step], -step))
    assert_close(load_file(whole / "best" / "model.safetensors"), weights(whole, best), rtol=0, atol=0)
    row = evaluate(EvaluateOptions("listops", model=whole / "best", data=data, split="val", device="cpu"))
    assert row.value == pytest.approx(scored[best])


def test_rows_record_the_results(whole, data):
    rows = {row.quantity: row for row in read_rows(whole / "rows.csv")}
    test = rows["test accuracy"]
    assert test.value == evaluate(EvaluateOptions("listops", model=whole / "best", data=data, device="cpu")).value
    assert (test.study, test.method, test.m, test.repeats, test.seed) == ("train listops", "nystrom-8+skip", 8, 30, 0)
    assert test.low is not None
    assert test.low < test.value < test.high
    splits = [ListOps(data, split) for split in ("train", "test")]
    assert rows["largest class of test"].value == splits[1].majority_share
    assert rows[FIRST_OPERATOR].value == first_operator_share(*splits)
    assert rows["steps"].value == 12
    assert rows["training time"].unit == "s"


def test_the_training_time_holds_no_scoring_of_the_test(tmp_path, small_run, monkeypatch, capsys):
    score_best = EncoderTrainer.score_best

    def after_an_hour(trainer, *given):
        trainer._seconds += 3600
        return score_best(trainer, *given)

    monkeypatch.setattr(EncoderTrainer, "score_best", after_an_hour)
    run = small_run(tmp_path / "run", steps=3)
    [row] = [row for row in read_rows(run / "rows.csv") if row.quantity == "training time"]
    assert 0 < row.value < 3600
    assert f"; {row.value:.0f} s of training" in capsys.readouterr().out


def test_batches_have_few_lengths(tmp_path, small_run, monkeypatch):
    seen, forward = set(), EncoderForSequenceClassification.forward

    def seeing(self, input_ids=None, **given):
        seen.add(input_ids.shape[1])
        return forward(self, input_ids=input_ids, **given)

    monkeypatch.setattr(EncoderForSequenceClassification, "forward", seeing)
    small_run(tmp_path / "run", steps=3)
    # Expressions have up to 41 tokens, lengths from 32 on are even.
    assert max(seen) > 32
    assert all(length % 2 == 0 for length in seen if length > 32)


def test_tensorboard_gets_the_curves_where_it_is_installed(whole):
    pytest.importorskip("tensorboard")
    assert list(whole.glob("runs/*/events.out.tfevents.*"))


def test_a_seed_decides_the_run(whole, small_run, tmp_path, weights):
    assert_close(weights(small_run(tmp_path / "same")), weights(whole), rtol=0, atol=0)
    other = weights(small_run(tmp_path / "other", seed=1))
    assert not torch.equal(other["classifier.dense.weight"], weights(whole)["classifier.dense.weight"])


@pytest.mark.long
def test_data_that_are_missing_are_made_once(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    sizes = DataSizes(folder="listops-demo", train=24, val=6, test=6, min_length=5, max_length=41)
    monkeypatch.setitem(PRESETS, ("listops", "demo"), dataclasses.replace(PRESETS["listops", "demo"], data=sizes))
    for seed in (0, 1):
        train(train_options("listops", preset="demo", seed=seed, steps=2, warmup_steps=0, batch_size=8, device="cpu"))
    said = capsys.readouterr().out
    assert said.count("data/listops-demo does not exist: preparing 24 + 6 + 6 samples of listops.") == 1
    assert (tmp_path / "runs" / "listops-nystrom-demo-seed1" / "best" / "model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_demo_beats_the_largest_class_by_twelve_points(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = train(train_options("listops", preset="demo", device="cpu"))
    rows = {row.quantity: row.value for row in read_rows(run / "rows.csv")}
    assert rows["test accuracy"] >= rows["largest class of test"] + 0.12


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"data": Path("nowhere")}, "data is nowhere, which does not exist.*data prepare listops --to nowhere"),
        ({"batch_size": 64}, "batch_size is 64 but data .* holds 48 training samples"),
        ({"threads": 0}, "threads is 0"),
        ({"device": "cuda", "precision": "float8"}, "device is 'cuda', but|precision is 'float8'"),
    ],
)
def test_what_cannot_be_trained_leaves_no_folder(small_run, tmp_path, monkeypatch, wrong, says):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=says):
        small_run(tmp_path / "run", **wrong)
    assert not (tmp_path / "run").exists()


def test_samples_longer_than_the_model_raise(small_run, tmp_path):
    long = prepare_listops(tmp_path / "long", train=20, val=4, test=4, min_length=520, max_length=700)
    with pytest.raises(ValueError, match=r"data .*long holds a sample of \d+ tokens in train, but the model has 512"):
        small_run(tmp_path / "run", data=long)
