"""Each preset, with each of its methods and some changes, resolves to the same settings and the same words as before.

resolved_settings.txt holds a checksum for each preset and method, over ten changes. A change that is meant is written
by `python packages/nystrom-lab/tests/training/test_resolved_settings.py`; with a word, such as `listops`, it prints
the settings whose names hold that word instead, to compare them before and after.
"""

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nystrom_lab.config import PretrainOptions, words_of
from nystrom_lab.training.presets import PRESETS
from nystrom_lab.training.pretrain.pretrain_settings import PRETRAINING, PretrainingSettings
from nystrom_lab.training.run_settings import Settings, train_options

KEPT = Path(__file__).with_name("resolved_settings.txt")
# Changes of train, with the number of positions by the name of its option.
CHANGES: list[dict[str, Any]] = [
    {},
    {"steps": 50},
    {"learning_rate": 0.01, "position_kind": "rotary"},
    {"evaluate_every": 7, "steps": 70},
    {"pooling": "cls", "batch_size": 8},
    {"max_length": 777},
    {"schedule": "cosine", "warmup_steps": 3, "clip_norm": 1.0},
    {"mask_share": 0.1},
    {"conv_kernel_size": 0},
    {"seed": 3, "accumulation": 2},
]
PRETRAIN_CHANGES: list[dict[str, Any]] = [
    {},
    {"steps": 30},
    {"length": 128},
    {"attention": "linformer"},
    {"learning_rate": 0.1, "hidden_size": 128},
]


def trained(task: str, preset: str, attention: str | None) -> Iterator[dict[str, Any]]:
    for change in CHANGES:
        named = dict(change)
        num_positions = named.pop("max_length", None)
        try:
            options = train_options(
                task=task, preset=preset, attention=attention, device="cpu", precision="float32", **named
            )
            settings = Settings.resolve(options, num_positions=num_positions)
            yield {"settings": settings.record(), "words": settings.words()}
        except (ValueError, TypeError) as error:
            yield {"refused": str(error)}


def pretrained(name: str) -> Iterator[dict[str, Any]]:
    for change in PRETRAIN_CHANGES:
        try:
            options = PretrainOptions(data=Path("mlm"), preset=name, device="cpu", precision="float32", **change)
            settings = PretrainingSettings.resolve(options, PRETRAINING[name], None)
            yield {"settings": settings.record(), "words": words_of(options)}
        except (ValueError, TypeError) as error:
            yield {"refused": str(error)}


def resolved(preset: str) -> dict[str, list[dict[str, Any]]]:
    """The settings of each method of a preset, by name; "pretrain NAME" is one of pretraining."""
    kind, _, name = preset.rpartition(" ")
    if kind == "pretrain":
        return {preset: list(pretrained(name))}
    base = PRESETS[kind, name]
    methods = [None, *base.methods(base.data.max_length), "softmax", "near_far"]
    return {f"{preset} {each}": list(trained(kind, name, each)) for each in methods}


NAMES = [" ".join(key) for key in PRESETS] + [f"pretrain {name}" for name in PRETRAINING]


def checksum(settings: list[dict[str, Any]]) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:16]


@pytest.mark.long
@pytest.mark.parametrize("preset", NAMES)
def test_a_preset_resolves_as_before(preset):
    kept = dict(line.rsplit(" ", 1) for line in KEPT.read_text(encoding="utf-8").splitlines())
    for name, settings in resolved(preset).items():
        assert kept[name] == checksum(settings), name


def test_each_preset_is_kept():
    kept = {line.rsplit(" ", 2)[0] for line in KEPT.read_text(encoding="utf-8").splitlines()}
    assert kept == {" ".join(key) for key in PRESETS} | {"pretrain"}


if __name__ == "__main__":
    found = {name: settings for preset in NAMES for name, settings in resolved(preset).items()}
    if words := sys.argv[1:]:
        shown = {name: settings for name, settings in found.items() if words[0] in name}
        print(json.dumps(shown, indent=1, sort_keys=True, default=str))
    else:
        KEPT.write_text("".join(f"{name} {checksum(settings)}\n" for name, settings in found.items()), encoding="utf-8")
