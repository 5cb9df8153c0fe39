"""Settings common to all trainings, and checks that steps, batches and points of the curve fit together."""

from collections.abc import Mapping
from dataclasses import Field
from typing import Any, ClassVar, Protocol

from nystrom.checks import check_at_least, check_positive, check_seed


class Schedule:
    """Base class of the settings of a training.

    Attributes:
        steps: Steps.
        batch_size: Global batch size: samples per step, over all processes and accumulation steps.
        accumulation: Gradient-accumulation steps.
        processes: Processes.
        context_parallel: Processes that split the tokens of each sample (context parallelism).
        learning_rate: Peak learning rate, at the end of the warm-up.
        warmup_steps: Steps of linear warm-up.
        evaluate_every: Steps between evaluations and checkpoints.
        log_every: Steps between points of the training curve.
        seed: Seed.
    """

    steps: int
    batch_size: int
    accumulation: int
    processes: int
    context_parallel: int = 1
    learning_rate: float
    warmup_steps: int
    evaluate_every: int
    log_every: int
    seed: int

    def __post_init__(self):
        for name in ("steps", "batch_size", "accumulation", "context_parallel", "evaluate_every", "log_every"):
            check_at_least(name, getattr(self, name), 1)
        check_seed("seed", self.seed)
        check_at_least("warmup_steps", self.warmup_steps, 0)
        check_positive("learning_rate", self.learning_rate)
        if self.warmup_steps >= self.steps:
            raise ValueError(
                f"warmup_steps is {self.warmup_steps} but steps is {self.steps}, so the learning rate would never be "
                "reached: use a shorter warm-up, or more steps."
            )
        if self.evaluate_every % self.log_every:
            raise ValueError(
                f"log_every is {self.log_every} but evaluate_every is {self.evaluate_every}; expected a divisor of it, "
                "so that a resumed run logs the same means."
            )
        if self.processes % self.context_parallel:
            raise ValueError(
                f"context_parallel is {self.context_parallel} but processes is {self.processes}; expected groups of "
                f"{self.context_parallel}: start a multiple of them, such as torchrun --nproc-per-node "
                f"{self.context_parallel} -m nystrom_lab."
            )
        if self.batch_size % (self.groups * self.accumulation):
            who = "processes" if self.context_parallel == 1 else f"groups of {self.context_parallel} processes"
            raise ValueError(
                f"batch_size is {self.batch_size} but {self.groups} {who} share it, each in accumulation = "
                f"{self.accumulation} parts; expected a multiple of {self.groups * self.accumulation}."
            )

    @property
    def groups(self) -> int:
        """Number of groups of processes that share samples; all processes if samples are not split."""
        return self.processes // self.context_parallel

    @property
    def part_size(self) -> int:
        """Samples per process and accumulation step, of which it may hold a piece."""
        return self.batch_size // (self.groups * self.accumulation)


class RunSettings(Protocol):
    """Settings of any kind of run: a frozen dataclass whose fields determine the result."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def attention(self) -> str:
        """Method."""
        ...

    @property
    def options(self) -> Mapping[str, object]:
        """Options of the method that differ from its defaults."""
        ...

    @property
    def seed(self) -> int:
        """Seed of all random draws."""
        ...

    @property
    def steps(self) -> int:
        """Steps."""
        ...

    @property
    def batch_size(self) -> int:
        """Global batch size: samples per step, over all processes and accumulation steps."""
        ...

    @property
    def part_size(self) -> int:
        """Samples per process and accumulation step."""
        ...

    @property
    def accumulation(self) -> int:
        """Gradient-accumulation steps."""
        ...

    @property
    def processes(self) -> int:
        """Processes."""
        ...

    @property
    def context_parallel(self) -> int:
        """Processes that split the tokens of each sample (context parallelism)."""
        ...

    @property
    def learning_rate(self) -> float:
        """Peak learning rate, at the end of the warm-up."""
        ...

    @property
    def warmup_steps(self) -> int:
        """Steps of linear warm-up."""
        ...

    @property
    def evaluate_every(self) -> int:
        """Steps between evaluations and checkpoints."""
        ...

    @property
    def log_every(self) -> int:
        """Steps between points of the training curve."""
        ...

    @property
    def device(self) -> str:
        """Device: "cpu" or "cuda"."""
        ...

    @property
    def precision(self) -> str:
        """Precision: "float32", "bfloat16" or "float16"."""
        ...
