"""The settings of a fine-tuning: the paper's, and changes to them.

The paper's: batches of 32, AdamW at 3e-5, four passes over the training texts, the best model on validation. The rest,
which the paper does not specify, is BERT's: a warm-up over a tenth of the steps, then linear decay, weight decay .01,
and gradients clipped to a norm of 1.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import product
from pathlib import Path

from nystrom.checks import check_at_least, check_positive
from nystrom_lab.training.schedule import Schedule


@dataclass(frozen=True)
class FinetunePreset:
    """The default settings of a fine-tuning.

    Attributes:
        batch_size: Texts per step.
        learning_rate: Peak learning rate, at the end of the warm-up.
        epochs: Passes over the training texts.
        warmup_share: Share of the steps used for warm-up.
        max_length: Truncation length of a text, or of a pair, if the model has that many positions.
        adam_betas: Betas of AdamW.
        adam_epsilon: Epsilon of AdamW.
        weight_decay: Weight decay of AdamW.
        clip_norm: Largest norm of the gradient of a step.
    """

    batch_size: int = 32
    learning_rate: float = 3e-5
    epochs: float = 4
    warmup_share: float = 0.1
    max_length: int = 512
    adam_betas: tuple[float, float] = (0.9, 0.999)
    adam_epsilon: float = 1e-8
    weight_decay: float = 0.01
    clip_norm: float = 1.0


PRESET = FinetunePreset()
# Points of the training curve between two evaluations, about.
_POINTS = 10


@dataclass(frozen=True)
class FinetuneSettings(Schedule):
    """Everything that determines the result of a fine-tuning, except the texts.

    Attributes:
        task: Task; "own" for a user's own texts.
        model: Name of the model that it starts from.
        weights: Checksum of that model's weights.
        attention: Method; "softmax" for exact attention.
        options: Options of the method that differ from its defaults.
        max_length: Truncation length of a text, or of a pair, in tokens.
        seed: Seed of the new head, the order of the texts and dropout.
        steps: Steps.
        batch_size: Global batch size: texts per step, over all processes and accumulation steps.
        accumulation: Gradient-accumulation steps.
        processes: Processes.
        learning_rate: Peak learning rate, at the end of the warm-up.
        warmup_steps: Steps of linear warm-up.
        evaluate_every: Steps between evaluations and checkpoints.
        log_every: Steps between points of the training curve.
        device: "cpu" or "cuda".
        precision: "float32", "bfloat16" or "float16".
        context_parallel: Processes that split the tokens of each sample (context parallelism).
    """

    task: str
    model: str
    weights: str
    attention: str
    options: Mapping[str, object]
    max_length: int
    seed: int
    steps: int
    batch_size: int
    accumulation: int
    processes: int
    learning_rate: float
    warmup_steps: int
    evaluate_every: int
    log_every: int
    device: str
    precision: str
    context_parallel: int = 1

    def __post_init__(self):
        super().__post_init__()
        check_at_least("max_length", self.max_length, 4)


@dataclass(frozen=True)
class TrainingExtent:
    """The length of a fine-tuning, as a user chose it; None means the preset's.

    Attributes:
        epochs: Passes over the training texts.
        steps: Steps, in place of passes.
        batch_size: Texts per step.
        warmup_steps: Steps of warm-up.
        evaluate_every: Steps between evaluations; None for one after each pass.
    """

    epochs: float | None = None
    steps: int | None = None
    batch_size: int = PRESET.batch_size
    warmup_steps: int | None = None
    evaluate_every: int | None = None

    def __post_init__(self):
        check_at_least("batch_size", self.batch_size, 1)
        if self.epochs is not None and self.steps is not None:
            raise ValueError(f"epochs is {self.epochs} and steps is {self.steps}: give one of the two.")
        if self.epochs is not None:
            check_positive("epochs", self.epochs)
        if self.steps is not None:
            check_at_least("steps", self.steps, 1)

    def in_steps(self, texts: int) -> dict[str, int]:
        """The same in steps, for a number of training texts; those that do not fill a batch are dropped from the pass.

        Raises:
            ValueError: The texts fill no batch.
        """
        if texts < self.batch_size:
            raise ValueError(
                f"batch_size is {self.batch_size} but there are {texts} training texts: use a smaller batch."
            )
        one_pass = texts // self.batch_size
        epochs = PRESET.epochs if self.epochs is None else self.epochs
        steps = max(1, round(one_pass * epochs)) if self.steps is None else self.steps
        every = min(one_pass, steps) if self.evaluate_every is None else self.evaluate_every
        warmup = int(PRESET.warmup_share * steps) if self.warmup_steps is None else self.warmup_steps
        return {
            "steps": steps,
            "batch_size": self.batch_size,
            "warmup_steps": warmup,
            "evaluate_every": every,
            "log_every": _divisor(every),
        }


def model_name(model: str) -> str:
    """The name of a model in rows: that of its folder, with the parent's if the folder is called best or model."""
    parts = Path(model).parts
    return "/".join(parts[-2:]) if parts[-1:] in (("best",), ("model",)) else "".join(parts[-1:])


def _divisor(every: int) -> int:
    """Steps between points of the curve; a divisor of `every`, so that a resumed run logs the same means."""
    check_at_least("evaluate_every", every, 1)
    wanted = max(1, every // _POINTS)
    near = max(step for step in range(1, wanted + 1) if every % step == 0)
    return near if 4 * near >= wanted else every


@dataclass(frozen=True)
class SearchGrid:
    """Values to try, in all combinations.

    Attributes:
        batch_size: Texts per step.
        learning_rate: Peak learning rate, at the end of the warm-up.
        epochs: Passes over the training texts.
        seed: Seeds.

    Raises:
        ValueError: A value is given twice.
    """

    batch_size: tuple[int, ...] = ()
    learning_rate: tuple[float, ...] = ()
    epochs: tuple[float, ...] = ()
    seed: tuple[int, ...] = ()

    def __post_init__(self):
        for name, values in self.values().items():
            if len(set(values)) < len(values):
                raise ValueError(
                    f"search.{name} is {' '.join(map(str, values))}, with a repeated value: leave the repetition out."
                )

    def __bool__(self) -> bool:
        return bool(self.values())

    def values(self) -> dict[str, tuple[float, ...]]:
        """The given values by name."""
        return {field.name: getattr(self, field.name) for field in fields(self) if getattr(self, field.name)}

    def trials(self) -> list[dict[str, float]]:
        """Each combination."""
        names = self.values()
        return [dict(zip(names, values, strict=True)) for values in product(*names.values())]


# The grid of the paper for MRPC.
PAPER_GRID = SearchGrid(batch_size=(8, 16, 32), learning_rate=(2e-5, 3e-5, 4e-5, 5e-5))
