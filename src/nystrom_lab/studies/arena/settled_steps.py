"""Time and memory of training steps, with the settings of real runs, in turn on one batch.

A step is the forward pass with dropout, the loss of the class, the backward pass, clipping by the norm if the settings
have it, and the update by AdamW. Tokens and classes are drawn at random, and all samples have one length: neither the
tokens nor the classes change the cost. Each round takes one step of every run in turn; ratios are taken within a round.

First each run takes three steps of one sample: one to warm up, one for the time and one for the memory. If, judging by
these, a step would take longer than a limit, or would not fit into half of the free memory, it is not run, and a note
says so with the estimate.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from nystrom.clock import free_bytes
from nystrom.turns import in_turns, quartiles
from nystrom_lab.measure.rows import Row, cpu_name, new_row
from nystrom_lab.studies.speed.interleaved import MEMORY_SHARE
from nystrom_lab.studies.speed.lra_models import random_batch
from nystrom_lab.studies.speed.lra_shapes import SHAPES
from nystrom_lab.studies.training_step import Batch, TrainingStep
from nystrom_lab.training.data.tasks import find_task
from nystrom_lab.training.presets.published import find_preset
from nystrom_lab.training.run_settings import Settings

TIME, MEMORY = "step time", "step memory"
_CPU = torch.device("cpu")


@dataclass
class StepCosts:
    """Measured costs of the steps of a run.

    Attributes:
        seconds: Seconds of a step in each round; empty if none was run.
        peak: Bytes beyond weights, optimizer and batch; None if no step was run.
        estimate: Seconds of a step, estimated from a step of one sample.
        weights: Number of learned weights.
        note: Why no step was run; "" if steps were.
        over: How many times the limit in the note a step would need.
    """

    estimate: float
    weights: int
    note: str
    over: float = 0.0
    seconds: list[float] = field(default_factory=list)
    peak: int | None = None


class SettledSteps(TrainingStep):
    """A model with the settings of a run and random weights, its optimizer, and its training steps on the CPU.

    Args:
        settings: The settings; their seed draws the weights.
    """

    def __init__(self, settings: Settings):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            model = find_task(settings.task).model(settings.encoder_config())
        preset = find_preset(settings.task, settings.preset)
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=settings.learning_rate, betas=settings.adam_betas, eps=preset.adam_epsilon,
            weight_decay=settings.weight_decay, fused=True,
        )  # fmt: skip
        super().__init__(model, optimizer, precision=settings.precision, clip_norm=settings.clip_norm)
        self.settings = settings

    @property
    def weights(self) -> int:
        """Number of learned weights."""
        return sum(weight.numel() for weight in self.model.parameters() if weight.requires_grad)


def whole_samples(task: str, n: int, batch: int, seed: int = 0) -> Batch:
    """Random samples of n real tokens."""
    return random_batch(replace(SHAPES[task], n=n, padded=False), batch, seed, _CPU)


def estimated(run: SettledSteps, n: int, batch: int, *, limit_seconds: float) -> StepCosts:
    """What a step would cost, estimated from steps of one sample.

    Args:
        run: The run.
        n: Tokens of a sample.
        batch: Samples of a step.
        limit_seconds: Skip steps that would take longer.
    """
    one = whole_samples(run.settings.task, n, 1)
    run.step(one)
    estimate = run.seconds(one) * batch
    note, over, need, free = "", 0.0, run.peak_bytes(one) * batch, MEMORY_SHARE * free_bytes(_CPU)
    if need > free:
        over = need / free
        note = f"needs about {need / 1e9:.3g} GB, {MEMORY_SHARE:.0%} of the free memory is {free / 1e9:.3g} GB"
    elif estimate > limit_seconds:
        over = estimate / limit_seconds
        note = f"would take about {estimate:.3g} s a step, the limit is {limit_seconds:g} s"
    return StepCosts(estimate, run.weights, note, over)


def measure_in_turn(
    settings: Mapping[str, Settings], n: int, batch: int, *, rounds: int, limit_seconds: float
) -> dict[str, StepCosts]:
    """Measure steps of several runs of one task in turn.

    Args:
        settings: Settings of each run, by name.
        n: Tokens of a sample.
        batch: Samples of a step.
        rounds: Timed steps of each run.
        limit_seconds: Skip steps that would take longer.
    """
    runs = {name: SettledSteps(each) for name, each in settings.items()}
    costs = {name: estimated(run, n, batch, limit_seconds=limit_seconds) for name, run in runs.items()}
    able = [name for name in runs if not costs[name].note]
    samples = whole_samples(next(iter(settings.values())).task, n, batch)
    for name, taken in in_turns({name: partial(runs[name].seconds, samples) for name in able}, rounds).items():
        costs[name].seconds = taken
        costs[name].peak = runs[name].peak_bytes(samples)
    return costs


def cost_rows(name: str, costs: StepCosts, settings: Settings, *, n: int, facts: Mapping[str, object]) -> list[Row]:
    """Rows of a step: its time in ms with quartiles, and its memory in MB; NaN with a note if it was not run.

    Args:
        name: The method of the rows.
        costs: What was measured.
        settings: Settings of the run.
        n: Tokens of a sample.
        facts: Facts beside the numbers of weights and of threads.
    """
    shared: dict[str, Any] = {
        "study": "", "method": name, "n": n, "dtype": settings.precision, "seed": settings.seed, "device": cpu_name(),
        "facts": {**facts, "weights": costs.weights, "threads": torch.get_num_threads()},
    }  # fmt: skip
    if costs.peak is None:
        shared |= {"value": float("nan"), "note": costs.note, "repeats": 0}
        return [new_row(quantity=TIME, unit="ms", **shared), new_row(quantity=MEMORY, unit="MB", **shared)]
    low, middle, high = quartiles([1e3 * value for value in costs.seconds])
    return [
        new_row(quantity=TIME, value=middle, low=low, high=high, unit="ms", repeats=len(costs.seconds), **shared),
        new_row(quantity=MEMORY, value=costs.peak / 1e6, unit="MB", **shared),
    ]
