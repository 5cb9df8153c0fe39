r"""Optional improvements for the Long Range Arena: parts of the model and its training that a preset may use.

A field has the same name in presets, in the settings of a run and in `nystrom train`; the defaults are the plain model
and training of Nyströmformer and Skyformer. Locality: positions and short convolutions. Regularity: augmentation and
denoising.
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
    """Parts of the model and training; `nystrom_lab.training.options.PresetChanges` documents each.

    `position_kind` is its `positions`.
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
        """Check the fields that no model checks.

        Raises:
            ValueError: An invalid field; the message names it.
        """
        check_at_least("short_conv_kernel_size", self.short_conv_kernel_size, 0)
        check_choice("schedule", self.schedule, get_args(LearningRateSchedule))
        check_flag("augment", self.augment)
        check_flag("drop_weights", self.drop_weights)
        if self.drop_weights and self.design != "authors":
            raise ValueError(
                f"drop_weights is True, but design is {self.design!r}, which stores no weights that could be dropped: "
                "use design 'authors', or leave drop_weights out."
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
