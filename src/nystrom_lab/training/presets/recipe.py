r"""What lifts attention on the Long Range Arena: parts of the model and of its training that a preset has or has not.

A field stands under its own name in presets, in the settings of a run and in `nystrom train`, and its default is the
plain model and training of Nyströmformer and Skyformer. Locality: positions and short convolutions. Regularity:
augmentation and denoising.
"""

from dataclasses import dataclass, fields
from typing import Literal, get_args

from nystrom.checks import (
    Design,
    FeedForward,
    PooledNormKind,
    Pooling,
    PositionKind,
    check_at_least,
    check_choice,
    check_flag,
)

LearningRateSchedule = Literal["linear", "cosine", "constant", "rsqrt"]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Parts of the model and of the training.

    Attributes:
        position_kind: Positions of the encoder, `positions` of `EncoderConfig`.
        rotary_share: Share of the width that turns, where positions are rotary.
        rotary_across_heads: Whether the angles of rotary positions are spread over the heads.
        short_conv_kernel_size: Taps of the convolutions of queries, keys and values; 0 for none.
        pooling: What the classification head reads.
        pooled_norm: Norm of that over the sequences of a batch.
        feed_forward: The feed-forward block.
        design: Whose head, dropout and initial values the model has.
        drop_weights: Whether weights of exact and kernelized attention are dropped, with the dropout of the hidden
            states, in the design "authors"; other methods have none to drop.
        schedule: Of the learning rate after its linear warm-up: "linear" or "cosine" to 0, "constant", or "rsqrt", the
            inverse root of the step.
        clip_norm: Largest norm of the gradient of a step, larger ones are scaled down to it; 0 for any.
        adam_betas: Decay of AdamW's running means.
        weight_decay: Of AdamW, on all weights but biases and norms.
        label_smoothing: Share of a label that is spread evenly over all classes, in training.
        ema: Decay of the running mean of the weights that is evaluated and kept; 0 for the weights themselves.
        augment: Whether training samples are varied.
        denoise: Weight of the loss of predicting every token of an input that was corrupted; 0 for clean inputs.
    """

    position_kind: PositionKind = "learned"
    rotary_share: float = 1.0
    rotary_across_heads: bool = False
    short_conv_kernel_size: int = 0
    pooling: Pooling = "mean"
    pooled_norm: PooledNormKind = "none"
    feed_forward: FeedForward = "plain"
    design: Design = "transformers"
    drop_weights: bool = False
    schedule: LearningRateSchedule = "linear"
    clip_norm: float = 0.0
    adam_betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    label_smoothing: float = 0.0
    ema: float = 0.0
    augment: bool = False
    denoise: float = 0.0

    def check_recipe(self) -> None:
        """Check what no model checks.

        Raises:
            ValueError: A field that cannot be used, by name.
        """
        check_at_least("short_conv_kernel_size", self.short_conv_kernel_size, 0)
        check_choice("schedule", self.schedule, get_args(LearningRateSchedule))
        check_flag("augment", self.augment)
        check_flag("drop_weights", self.drop_weights)
        if self.drop_weights and self.design != "authors":
            raise ValueError(
                f"drop_weights is True, but design is {self.design!r}, which stores no weights that could be dropped: "
                "take design 'authors', or leave drop_weights out."
            )
        for name in ("clip_norm", "weight_decay", "denoise"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected a number of at least 0, 0 for none.")
        for name in ("label_smoothing", "ema"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected a number in [0, 1), 0 for none.")
        if len(self.adam_betas) != 2 or not all(0 <= beta < 1 for beta in self.adam_betas):
            raise ValueError(f"adam_betas is {self.adam_betas!r}; expected two numbers in [0, 1).")


RECIPE: tuple[str, ...] = tuple(entry.name for entry in fields(Recipe))
# Names of arguments of `nystrom train` that differ from those of fields.
ARGUMENTS = {"position_kind": "positions"}
