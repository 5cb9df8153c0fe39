"""What the settings of every training share: how its steps, batches and points of the curve fit together."""

from collections.abc import Mapping
from dataclasses import Field
from typing import Any, ClassVar, Protocol

from nystrom.checks import check_at_least, check_positive


class Schedule:
    """Base of the settings of a training, which have these fields among theirs.

    Attributes:
        steps: Steps.
        batch_size: Samples per step, over all processes and accumulated parts.
        accumulation: Parts that a process computes its share of a batch in.
        processes: Processes.
        learning_rate: At the end of the warm-up.
        warmup_steps: Steps of linear warm-up.
        evaluate_every: Steps between evaluations and checkpoints.
        log_every: Steps between points of the training curve.
        seed: Seed.
    """

    steps: int
    batch_size: int
    accumulation: int
    processes: int
    learning_rate: float
    warmup_steps: int
    evaluate_every: int
    log_every: int
    seed: int

    def __post_init__(self):
        for name in ("steps", "batch_size", "accumulation", "evaluate_every", "log_every"):
            check_at_least(name, getattr(self, name), 1)
        check_at_least("seed", self.seed, 0)
        check_at_least("warmup_steps", self.warmup_steps, 0)
        check_positive("learning_rate", self.learning_rate)
        if self.warmup_steps >= self.steps:
            raise ValueError(
                f"warmup_steps is {self.warmup_steps} but steps is {self.steps}, so the learning rate would never be "
                "reached: take a shorter warm-up, or more steps."
            )
        if self.evaluate_every % self.log_every:
            raise ValueError(
                f"log_every is {self.log_every} but evaluate_every is {self.evaluate_every}; expected a divisor of it, "
                "so that a resumed run logs the same means."
            )
        if self.batch_size % (self.processes * self.accumulation):
            raise ValueError(
                f"batch_size is {self.batch_size} but {self.processes} processes share it, each in accumulation = "
                f"{self.accumulation} parts; expected a multiple of {self.processes * self.accumulation}."
            )

    @property
    def part_size(self) -> int:
        """Samples that one process takes at a time."""
        return self.batch_size // (self.processes * self.accumulation)


class RunSettings(Protocol):
    """Settings of a run of any kind: a frozen dataclass, whose fields decide the result."""

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
        """Of everything that is drawn."""
        ...

    @property
    def steps(self) -> int:
        """Steps."""
        ...

    @property
    def batch_size(self) -> int:
        """Samples per step, over all processes and accumulated parts."""
        ...

    @property
    def part_size(self) -> int:
        """Samples that one process takes at a time."""
        ...

    @property
    def accumulation(self) -> int:
        """Parts that a process computes its share of a batch in."""
        ...

    @property
    def processes(self) -> int:
        """Processes."""
        ...

    @property
    def learning_rate(self) -> float:
        """At the end of the warm-up."""
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
        """Where it runs: "cpu" or "cuda"."""
        ...

    @property
    def precision(self) -> str:
        """What is computed in: "float32", "bfloat16" or "float16"."""
        ...

    @property
    def track_error(self) -> bool:
        """Whether the curves have the error of attention."""
        ...
