"""The settings of a fine-tuning: the paper's, and changes to them.

The paper's: batches of 32, AdamW at 3e-5, four passes over the training texts, the best model on validation. The rest,
which the paper does not specify, is BERT's: a warm-up over a tenth of the steps, then linear decay, weight decay .01,
and gradients clipped to a norm of 1.
"""

from dataclasses import dataclass, field
from pathlib import Path

from nystrom.checks import check_at_least, check_positive
from nystrom_lab.config import FinetuneOptions, Optimizer, Resolved

OPTIMIZER = Optimizer(schedule="linear", clip_norm=1.0, adam_betas=(0.9, 0.999), weight_decay=0.01)
ADAM_EPSILON = 1e-8
BATCH_SIZE, EPOCHS, WARMUP_SHARE, MAX_LENGTH = FinetuneOptions.batch_size, 4.0, 0.1, 512
# Points of the training curve between two evaluations, about.
_POINTS = 10


@dataclass(frozen=True)
class FinetuneSettings(Resolved, FinetuneOptions):
    """Everything that determines the result of a fine-tuning, except the texts.

    `task` is "own" for a user's own texts, and `model` the name of the model that it starts from.
    """

    task: str = "own"
    max_length: int = field(kw_only=True)

    def __post_init__(self):
        super().__post_init__()
        check_at_least("max_length", self.max_length, 4)


def check_extent(options: FinetuneOptions) -> None:
    """Check how long the training is.

    Raises:
        ValueError: An invalid number, or two that contradict.
    """
    if options.epochs is not None and options.steps is not None:
        raise ValueError(f"epochs is {options.epochs} and steps is {options.steps}: give one of the two.")
    if options.epochs is not None:
        check_positive("epochs", options.epochs)


def in_steps(options: FinetuneOptions, texts: int) -> dict[str, int]:
    """How long the training is, for a number of texts; those that do not fill a batch are dropped from the pass.

    Raises:
        ValueError: The texts fill no batch.
    """
    if texts < options.batch_size:
        raise ValueError(
            f"batch_size is {options.batch_size} but there are {texts} training texts: use a smaller batch."
        )
    one_pass = texts // options.batch_size
    epochs = EPOCHS if options.epochs is None else options.epochs
    steps = max(1, round(one_pass * epochs)) if options.steps is None else options.steps
    every = min(one_pass, steps) if options.evaluate_every is None else options.evaluate_every
    warmup = int(WARMUP_SHARE * steps) if options.warmup_steps is None else options.warmup_steps
    return {"steps": steps, "warmup_steps": warmup, "evaluate_every": every, "log_every": _divisor(every)}


def model_name(model: str) -> str:
    """The name of a model in rows: that of its folder, with the parent's if the folder is called best or model."""
    parts = Path(model).parts
    return "/".join(parts[-2:]) if parts[-1:] in (("best",), ("model",)) else "".join(parts[-1:])


def _divisor(every: int) -> int:
    """Steps between points of the curve; a divisor of `every`, so that a resumed run logs the same means."""
    wanted = max(1, every // _POINTS)
    near = max(step for step in range(1, wanted + 1) if every % step == 0)
    return near if 4 * near >= wanted else every
