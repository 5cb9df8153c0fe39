"""Options that several commands share: each stands once, with its documentation."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar, cast

from nystrom.attention.options import option_docs
from nystrom.checks import Design, FeedForward, PooledNormKind, Pooling, PositionKind, check_at_least
from nystrom_lab.training.hardware import TIMEOUT, Device, Precision
from nystrom_lab.training.presets.recipe import LearningRateSchedule

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class LoopChanges:
    """What a run changes of its preset's training; None leaves the preset's value.

    Attributes:
        steps: Steps. A shorter run has a warm-up shorter in proportion.
        batch_size: Samples per step, over all processes and accumulated parts.
        learning_rate: Learning rate at the end of the warm-up.
        warmup_steps: Steps of linear warm-up.
        dropout: Dropout on the hidden states.
        evaluate_every: Steps between evaluations, each followed by a checkpoint.
        log_every: Steps between points of the training curve; divides evaluate_every.
    """

    steps: int | None = None
    batch_size: int | None = None
    learning_rate: float | None = None
    warmup_steps: int | None = None
    dropout: float | None = None
    evaluate_every: int | None = None
    log_every: int | None = None

    def asdict(self) -> dict[str, Any]:
        """All of them by name."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class PresetChanges(LoopChanges):
    """What a run of the Long Range Arena changes in its preset, beside the training itself.

    Attributes:
        positions: "learned", a table; "rotary", queries and keys turned by their position; or "none".
        rotary_share: Share of the width that turns, of rotary positions.
        rotary_across_heads: The angles of rotary positions are spread over the heads, from local to global ones.
        short_conv_kernel_size: Size of the convolutions of queries, keys and values before the method; 0 for none.
        pooling: What the classification head reads of the tokens: "mean", "first", "max", or "cls", a learned token
            before the first.
        pooled_norm: "batch" brings each channel of that to mean 0 and variance 1 over the samples that a process
            computes at once; or "none".
        feed_forward: "plain", "gated" by the activation (GEGLU, SwiGLU), or "glu", gated by the sigmoid.
        design: Classification head, dropout and initial values as in "transformers", in the papers' code ("authors") or
            in the "official" code of the Long Range Arena.
        drop_weights: Drop weights of exact and kernelized attention, which are then stored, in the design "authors";
            other methods have none to drop.
        schedule: The learning rate after the warm-up: "linear" or "cosine" to 0, "constant", or "rsqrt", the inverse
            root of the step.
        clip_norm: Largest norm of the gradient of a step; 0 for any.
        adam_betas: Decay of AdamW's running means.
        weight_decay: Weight decay of AdamW, on all weights but biases and norms.
        label_smoothing: Share of a label that is spread evenly over the classes, in training.
        ema: Decay of a running mean of the weights, which is evaluated and kept in their place; 0 for none.
        augment: Vary training samples anew in each pass: the arguments of ListOps in another order, texts cropped,
            pictures mirrored, shifted and scaled (Pathfinder: mirrored).
        denoise: Weight of the loss of predicting every token of an input of which 30 % is corrupted; 0 for clean
            inputs.
    """

    positions: PositionKind | None = None
    rotary_share: float | None = None
    rotary_across_heads: bool | None = None
    short_conv_kernel_size: int | None = None
    pooling: Pooling | None = None
    pooled_norm: PooledNormKind | None = None
    feed_forward: FeedForward | None = None
    design: Design | None = None
    drop_weights: bool | None = None
    schedule: LearningRateSchedule | None = None
    clip_norm: float | None = None
    adam_betas: tuple[float, float] | None = None
    weight_decay: float | None = None
    label_smoothing: float | None = None
    ema: float | None = None
    augment: bool | None = None
    denoise: float | None = None


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a training runs.

    Attributes:
        seed: Determines new weights, the order of the samples, what is drawn, and dropout.
        resume: Continue the run in the folder, from its last complete checkpoint.
        accumulation: Parts in which a process computes its share of a batch, to save memory; in evaluations too.
        context_parallel: Processes that share the tokens of each sample, for samples that do not fit into one.
        precision: "auto" is bfloat16 autocast on an accelerator that has it, and float32 elsewhere.
        device: "auto" is an accelerator where there is one.
        track_error: Also record the error of attention against exact attention, estimated from a few queries; for
            models of this library.
        threads: Threads on the CPU; torch's choice if not given.
        timeout: Seconds that a process waits for the others; then the run ends, and can be resumed.
    """

    seed: int = 0
    resume: bool = False
    accumulation: int = 1
    context_parallel: int = 1
    precision: Precision = "auto"
    device: Device = "auto"
    track_error: bool = False
    threads: int | None = None
    timeout: int = TIMEOUT

    def __post_init__(self):
        check_at_least("timeout", self.timeout, 1)
        if self.threads is not None:
            check_at_least("threads", self.threads, 1)


def taking(**groups: type) -> Callable[[F], F]:
    """Give a function the fields of classes of options as keyword arguments of its own, documentation included.

    The function takes an instance of each class by name; where its docstring has a line `**name: ...`, callers, command
    lines and readers see the fields.

    Args:
        **groups: Classes of options, by the names of the function's arguments.
    """

    def give(function: F) -> F:
        parameters: list[inspect.Parameter] = []
        for parameter in inspect.signature(function).parameters.values():
            kind = groups.get(parameter.name)
            parameters += (
                [parameter]
                if kind is None
                else [
                    inspect.Parameter(entry.name, parameter.KEYWORD_ONLY, default=entry.default, annotation=entry.type)
                    for entry in fields(kind)
                ]
            )

        @functools.wraps(function)
        def call(*args: Any, **named: Any) -> Any:
            for name, kind in groups.items():
                given = {entry.name: named.pop(entry.name) for entry in fields(kind) if entry.name in named}
                named[name] = kind(**given)
            return function(*args, **named)

        lines: list[str] = []
        for line in (function.__doc__ or "").splitlines():
            name, indent = line.strip().partition(":")[0], line[: len(line) - len(line.lstrip())]
            if not name.startswith("**") or name[2:] not in groups:
                lines.append(line)
                continue
            kinds = reversed(groups[name[2:]].__mro__[:-1])
            for option, text in {name: text for kind in kinds for name, text in option_docs(kind).items()}.items():
                lines.append(f"{indent}{option}: " + text.replace("\n", f"\n{indent}    "))
        call.__doc__ = "\n".join(lines)
        call.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportAttributeAccessIssue]
        return cast("F", call)

    return give
