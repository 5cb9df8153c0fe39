"""The command of a row reproduces the run of the row."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from nystrom.models import EncoderModel
from nystrom_lab.cli.main import main
from nystrom_lab.config import TrainOptions, command_line
from nystrom_lab.measure.rows import read_rows
from nystrom_lab.training.run_settings import Settings, train_options

PLACES = {"data": Path("data/x"), "to": Path("runs/x")}


@pytest.fixture
def trained(monkeypatch, tmp_path):
    """The training that the command line asks for, without training."""
    values = {}
    monkeypatch.chdir(tmp_path)
    PLACES["data"].mkdir(parents=True)
    monkeypatch.setattr("nystrom_lab.training.train.train", lambda options: values.update(vars(options)))
    return values


def settings_of(task="listops", **options):
    named = {"attention": "nystrom", "preset": "demo", "device": "cpu", "seed": 3} | options
    return Settings.resolve(train_options(task, **named))


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"options": {"num_landmarks": 8, "pinv": "ridge"}, "conv_kernel_size": 0},
        {"attention": "linformer", "options": {"num_features": 16, "per_head": True}, "conv_kernel_size": 5},
        {"steps": 50, "batch_size": 8, "learning_rate": 3e-4, "warmup_steps": 2, "dropout": 0.0, "accumulation": 2},
        {"steps": 60, "evaluate_every": 30, "log_every": 10},
        {"attention": "reformer", "options": {"across_buckets": True, "shared_qk": False}},
        {"position_kind": "rotary", "rotary_share": 0.5, "rotary_across_heads": True, "short_conv_kernel_size": 3},
        {"attention": "none", "pooling": "max", "pooled_norm": "batch", "feed_forward": "glu"},
        {"adam_betas": (0.9, 0.98), "clip_norm": 1.0},
        {"schedule": "cosine", "label_smoothing": 0.1, "augment": True, "denoise": 1.0},
        {"compile": True},
    ],
)
def test_the_words_make_the_settings(given, trained):
    settings = settings_of(**given)
    assert main(replace(settings, **PLACES, threads=2).words()) == 0
    assert (str(trained["data"]), str(trained["to"]), trained["threads"]) == ("data/x", "runs/x", 2)
    assert Settings.resolve(TrainOptions(**trained)) == settings


@pytest.mark.long
def test_rows_record_the_command_however_the_run_was_started(whole, data):
    commands = {row.command for row in read_rows(whole / "rows.csv")}
    assert len(commands) == 1
    words = shlex.split(commands.pop())
    assert words[:3] == ["nystrom", "train", "listops"]
    settings = json.loads((whole / "run.json").read_text())["settings"]
    for flag, value in (("--steps", settings["steps"]), ("--options.num-landmarks", 8), ("--data", data.name)):
        assert words[words.index(flag) + 1] == str(value)


def test_several_processes_are_in_the_command():
    assert command_line(["train", "text", "--to", "/tmp/run"], 4) == (
        "torchrun --nproc-per-node 4 -m nystrom_lab train text --to run"
    )


def test_the_words_of_a_pretraining_and_of_what_starts_from_it_make_the_settings(trained):
    settings = settings_of(mask_share=0.2)
    words = replace(settings, **PLACES).words()
    assert words[:2] == ["pretrain", "listops"]
    assert main(words) == 0
    assert trained["mask_share"] == 0.2
    best = Path("runs/pre/best")
    EncoderModel(settings.encoder_config()).save_pretrained(best)
    words = replace(settings, **PLACES, mask_share=0.0, model=best).words()
    assert words[:2] == ["train", "listops"]
    assert main(words) == 0
    assert (trained["mask_share"], str(trained["model"])) == (0.0, "runs/pre/best")
