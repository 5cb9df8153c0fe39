"""Epochs become steps, and the curve has points at divisors of the evaluations."""

import pytest

from nystrom_lab.config import FinetuneOptions
from nystrom_lab.training.finetune.finetune_settings import in_steps, model_name


def options_of(**options):
    return FinetuneOptions(model="bert", data=(), **options)


def test_the_setting_of_the_paper_in_steps():
    # MRPC: 3,668 pairs in batches of 32, four times.
    steps = in_steps(options_of(), 3668)
    assert steps == {"steps": 456, "warmup_steps": 45, "evaluate_every": 114, "log_every": 6}


@pytest.mark.parametrize(("changes", "steps", "every"), [
    ({"epochs": 0.5}, 57, 57), ({"steps": 10}, 10, 10), ({"steps": 300, "evaluate_every": 50}, 300, 50),
])  # fmt: skip
def test_steps_and_evaluations_are_as_asked(changes, steps, every):
    extent = in_steps(options_of(**changes), 3668)
    assert (extent["steps"], extent["evaluate_every"]) == (steps, every)
    assert every % extent["log_every"] == 0


def test_a_prime_number_of_steps_is_not_logged_at_each():
    assert in_steps(options_of(steps=1000, evaluate_every=113), 3668)["log_every"] == 113


def test_a_model_is_named_by_its_folder():
    assert [model_name(path) for path in ("a/bert", "runs/mrpc/best", "org/name")] == ["bert", "mrpc/best", "name"]
