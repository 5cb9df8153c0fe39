"""Time and memory of training steps as the settings of runs have them, in turn on one batch.

A step is the forward pass with dropout, the loss of the class, the backward pass, clipping by the norm where the
settings have it, and the update by AdamW. Tokens and classes are drawn at random, all samples being of one length: they
do not change the cost. Each round takes a step of every run in turn; ratios are taken within a round.

First each takes two steps of one sample. If by these a step would take longer than a limit, or would not fit into half
of the free memory, it is not run, and a note says so with the estimate.
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
    """What steps of a run were measured to cost.

    Attributes:
        seconds: Of a step in each round; empty where it was not run.
        peak: Bytes beyond weights, optimizer and batch; None where it was not run.
        estimate: Seconds of a step, by that of one sample.
        weights: Numbers that are learned.
        note: Why it was not run; "" where it was.
        over: How many times above the limit that the note names.
    """

    estimate: float
    weights: int
    note: str
    over: float = 0.0
    seconds: list[float] = field(default_factory=list)
    peak: int | None = None


class SettledSteps(TrainingStep):
    """A model by the settings of a run, with random weights, its optimizer, and steps of it on the CPU.

    Args:
        settings: The settings; their seed is that of the weights.
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
        """Numbers that are learned."""
        return sum(weight.numel() for weight in self.model.parameters() if weight.requires_grad)


def whole_samples(task: str, n: int, batch: int, seed: int = 0) -> Batch:
    """Random samples of n real tokens."""
    return random_batch(replace(SHAPES[task], n=n, padded=False), batch, seed, _CPU)


def estimated(run: SettledSteps, n: int, batch: int, *, limit_seconds: float) -> StepCosts:
    """What a step would cost, by two steps of one sample.

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
        rounds: Timed steps of each.
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
    """Rows of the time of a step, in ms with its quartiles, and of its memory in MB; NaN with a note where not run.

    Args:
        name: The method of the rows.
        costs: What was measured.
        settings: Settings of the run.
        n: Tokens of a sample.
        facts: What is added to the number of weights and of threads.
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
