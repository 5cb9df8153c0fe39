"""The options of a run are recorded, and compared with the record of an earlier run, by the fields of their class."""

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest

from nystrom_lab.config import FinetuneOptions, PretrainOptions
from nystrom_lab.training.finetune.finetune_settings import FinetuneSettings
from nystrom_lab.training.pretrain.pretrain_settings import PretrainingSettings, find_pretraining
from nystrom_lab.training.run_settings import Settings, train_options

# Settings of the three kinds of runs, by the version before the one class of options.
BEFORE = json.loads((Path(__file__).parent / "settings_before_config.json").read_text())
# An option that it had and that was off; a run that had it on is refused by its name.
GONE = {"train": {"ema": 0.0}}
HERE = {"device": "cpu", "precision": "float32"}


def train():
    options = {"preset": "modern-small", "attention": "linformer", "options": {"num_features": 16}, "augment": True}
    return Settings.resolve(train_options("listops", **options, **HERE, steps=50), num_positions=600)


def pretrain():
    options = PretrainOptions(data=Path("x"), preset="demo", steps=50, **HERE)
    return PretrainingSettings.resolve(options, find_pretraining("demo"), None)


def finetune():
    numbers = {"max_length": 128, "steps": 20, "batch_size": 16, "warmup_steps": 2, "evaluate_every": 10}
    method = {"attention": "nystrom", "options": {"num_landmarks": 8}}
    options = FinetuneOptions("mrpc", model="bert", data=(), seed=1, **numbers, **method, **HERE)
    given = {entry.name: getattr(options, entry.name) for entry in fields(FinetuneOptions)}
    return FinetuneSettings(**given, log_every=5, fingerprint="0123456789abcdef")


@pytest.mark.parametrize("kind", [train, pretrain, finetune])
def test_a_run_of_the_version_before_is_the_same_run(kind):
    settings, before = kind(), BEFORE[kind.__name__]
    assert settings.record() | GONE.get(kind.__name__, {}) == before
    assert settings.differences(before) == []
    assert settings.differences({**before, "learning_rate": 1.0}) == [
        f"learning_rate is {settings.learning_rate!r} but was 1.0"
    ]


def test_a_run_with_what_is_no_longer_there_is_refused_by_its_name():
    assert train().differences({**BEFORE["train"], "ema": 0.9, "track_error": True}) == ["ema is None but was 0.9"]


@pytest.mark.parametrize("kind", [train, pretrain, finetune])
def test_a_setting_that_an_older_run_lacks_had_its_default(kind):
    settings = kind()
    older = {name: value for name, value in BEFORE[kind.__name__].items() if name != "context_parallel"}
    assert settings.differences(older) == []
    assert replace(settings, processes=2, context_parallel=2, batch_size=32).differences(older | {"processes": 2}) == [
        f"batch_size is 32 but was {older['batch_size']}" for _ in [0] if older["batch_size"] != 32
    ] + ["context_parallel is 2 but was 1"]


def test_a_run_of_another_model_is_refused_by_the_part_that_changed():
    weights = BEFORE["finetune"]["weights"]
    settings = replace(finetune(), fingerprint=f"{weights}-00000000-11111111")
    assert settings.differences(BEFORE["finetune"]) == []
    before = replace(settings, fingerprint=f"{weights}-00000001-11111112").record()
    assert settings.differences(before) == [
        f"the {part} of its model changed" for part in ("configuration", "tokenizer")
    ]


def test_where_a_run_runs_is_not_recorded():
    settings = train()
    elsewhere = replace(settings, data=Path("elsewhere"), to=Path("run"), threads=3, timeout=7, resume=True)
    assert elsewhere.record() == settings.record()
