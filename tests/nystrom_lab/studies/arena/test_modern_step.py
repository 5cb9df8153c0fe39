"""The cost of a step of the preset modern: rules on rows made by hand, and a short measurement."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from nystrom_lab.measure.rows import new_row
from nystrom_lab.studies.arena import modern_step
from nystrom_lab.studies.arena.modern_step import LENGTHS, MODELS, RATIO, STUDIES, growth, settings_of
from nystrom_lab.studies.arena.settled_steps import (
    MEMORY,
    TIME,
    SettledSteps,
    estimated,
    measure_in_turn,
    whole_samples,
)
from nystrom_lab.studies.reproduce.run import check_study, run_study
from nystrom_lab.studies.reproduce.study import Setting
from nystrom_lab.training.presets.modern import MODERN

STUDY = STUDIES["modern-step"]


def rows(*, ratio=1.2, power=1.0, lengths=(1024, 2048, 4096), spread=0.0):
    shared = {"study": "", "method": "modern", "device": "a CPU"}
    made = []
    for n in lengths:
        for quantity, unit in ((TIME, "ms"), (MEMORY, "MB")):
            value = 0.1 * n**power
            ends = {"low": value * (1 - spread), "high": value * (1 + spread)}
            made.append(new_row(quantity=quantity, value=value, unit=unit, n=n, **ends, **shared))
        value = ratio if n == max(lengths) else 1.0
        ends = {"low": value * (1 - spread), "high": value * (1 + spread)}
        made.append(new_row(quantity=RATIO, value=value, unit="", n=n, **ends, **shared))
    return made


@pytest.mark.parametrize(
    ("changes", "agrees"),
    [
        ({}, [True, True, True]),
        ({"ratio": 1.51}, [False, True, True]),
        ({"power": 1.2}, [True, False, False]),
        ({"lengths": (1024, 2048)}, [True, None, None]),
        ({"lengths": ()}, [None, None, None]),
        # The limit is within the quartiles; and a cost that hardly grows.
        ({"ratio": 1.45, "power": 1.05, "spread": 0.05}, [None, None, None]),
        ({"ratio": 1.6, "power": 1.3, "spread": 0.05}, [False, False, False]),
        ({"power": 0.4}, [True, None, None]),
        ({"power": -0.4}, [True, None, None]),
    ],
)
def test_each_rule_decides_both_ways(changes, agrees):
    assert [verdict.agrees for verdict in STUDY.verdicts(rows(**changes))] == agrees


def test_the_growth_is_the_power_of_the_length():
    found = {row.n: row for row in rows(power=1.3) if row.quantity == TIME}
    assert growth(found) == pytest.approx(1.3, abs=1e-12)


def test_what_a_step_costs_at_any_length_does_not_hide_its_growth():
    found = {row.n: row for row in rows(lengths=(1024, 2048, 4096, 8192, 16384)) if row.quantity == TIME}
    quadratic = {n: replace(row, value=140.0 + 5e-6 * n**2) for n, row in found.items()}
    assert growth(quadratic) > 1.5


def test_the_models_are_the_plain_one_and_those_that_add_a_part_each():
    configs = [settings_of(name, 4096, "float32").encoder_config() for name in MODELS]
    [text] = [preset for preset in MODERN if (preset.name, preset.task) == ("modern", "text")]
    for config in configs:
        assert (config.num_hidden_layers, config.hidden_size) == (text.num_hidden_layers, text.hidden_size)
        assert (config.attention, config.attention_options) == ("nystrom", {"num_landmarks": 128})
    parts = [(c.positions, c.short_conv_kernel_size, c.feed_forward) for c in configs]
    assert parts == [
        ("learned", None, "plain"), ("rotary", None, "plain"), ("rotary", 3, "plain"), ("rotary", 3, "gated"),
    ]  # fmt: skip
    assert [settings_of(name, 4096, "float32").clip_norm for name in MODELS] == [0.0, 0.0, 0.0, 1.0]


def test_a_step_changes_the_weights_and_clips_where_the_settings_say_so(monkeypatch):
    clipped = []
    monkeypatch.setattr("torch.nn.utils.clip_grad_norm_", lambda weights, norm: clipped.append(norm))
    for name in ("plain", "modern"):
        run = SettledSteps(settings_of(name, 256, "float32"))
        before = [weight.clone() for weight in run.model.parameters()]
        run.step(whole_samples("text", 256, 1))
        # Each step of AdamW moves every weight that has a gradient; the bias of the keys has none but rounding.
        moved = [not weight.equal(old) for weight, old in zip(run.model.parameters(), before, strict=True)]
        assert sum(moved) > 0.9 * len(moved)
    assert clipped == [1.0]


def test_what_takes_too_long_or_too_much_is_not_run(monkeypatch):
    run = SettledSteps(settings_of("plain", 256, "float32"))
    note = estimated(run, 256, 4, limit_seconds=1e-9).note
    # Three digits, so that a short step is not 0 s.
    assert "would take about" in note
    assert "about 0 s" not in note
    monkeypatch.setattr("nystrom_lab.studies.arena.settled_steps.free_bytes", lambda device: 1000)
    settings = {"plain": run.settings}
    [cost] = measure_in_turn(settings, 256, 2, rounds=2, limit_seconds=60).values()
    assert "50% of the free memory is 5e-07 GB" in cost.note
    assert (cost.seconds, cost.peak) == ([], None)


@pytest.mark.long
def test_the_study_measures_every_length(tmp_path, monkeypatch):
    monkeypatch.setattr(modern_step, "LENGTHS", LENGTHS | {"small": (64, 128, 256)})
    monkeypatch.setattr(modern_step, "ROUNDS", {"small": 2})
    job = check_study("modern-step", Setting(precision="float32"), tmp_path)
    assert [part.name for part in job.plan.parts] == ["n=64", "n=128", "n=256"]
    summary = run_study(job, lambda line: None)
    assert summary.rows == 3 * len(MODELS) * 3
    assert not any(math.isnan(float(cell)) for line in summary.tables[0].lines for cell in line[2:] if cell)
    assert None not in [verdict.agrees for verdict in summary.verdicts]
    assert (Path(job.folder) / "modern-step.png").is_file()
