"""Improvements for the Long Range Arena in one model: rotary positions, short convolutions, gates, clipping.

The sequence stays one-dimensional: positions and convolutions are not those of images.

"modern" has MEGA's layers, widths, batches, steps, warm-up, dropout and weight decay, its clipping by a norm of 1, its
betas and its linear decay; the heads, the rates and the positions of arXiv:2501.14850, whose model is attention; the
short convolutions of So et al., and the gate of Shazeer (GEGLU). All methods have the same model around them and no
convolution of the values, so that runs differ only in the attention. Augmentation and denoising are optional:
`--augment True --denoise 1`.

"modern-small" is ours, for one core: the same parts, the pooled tokens normed over the batch, and two layers of width
128, on ListOps of 16 to 512 tokens and on texts of 1,000 bytes. Texts have convolutions of 13 bytes, plain blocks, and
a head that reads the largest value of each channel. Validation texts are held out of the training texts, so that few
of them are evaluated:

    nystrom data prepare text --from aclImdb --max-length 1000 --val-share 0.1 --to data/text-small

On Pathfinder, of pictures with short snakes, the width is 64, and convolutions of 65 pixels reach the rows above and
below. It is meant to start from an encoder that has learned masked pictures (`nystrom pretrain pathfinder`).

Image has the model of Pathfinder, the published pictures, and random weights to start from. Retrieval has the
convolutions of Text with the mean of the tokens, width 64, and the first 1,000 bytes of each document of a set as small
as ScisummNet's:

    nystrom data prepare retrieval --from scisummnet --max-length 1000 --to data/retrieval-small

With Nyström attention it has been trained to its end on each task, once (docs/long-range-arena-measured.md); "modern"
has not.

Source: Ma et al. (2022), arXiv:2209.10655; arXiv:2501.14850; So et al. (2021), arXiv:2109.08668; Shazeer (2020),
arXiv:2002.05202.
Departs from MEGA: attention in place of its layer, and the learning rates; weights start with the standard deviation of
torch's linear layers. From arXiv:2501.14850: MEGA's steps in place of its epochs, no dropped learning rates, no
corruption or augmentation unless requested.
"""

from collections.abc import Mapping
from dataclasses import replace

from nystrom.attention.method_names import NO_ATTENTION
from nystrom_lab.training.presets.nystromformer import linformer, reformer
from nystrom_lab.training.presets.preset import MethodSetting, Preset
from nystrom_lab.training.presets.sizes import DataSizes, published_sizes


def _methods(length: int) -> Mapping[str, MethodSetting]:
    return {
        "nystrom": MethodSetting({"num_landmarks": 128}),
        "skyformer": MethodSetting({"num_landmarks": 128}),
        "linformer": linformer(128, length),
        "performer": MethodSetting({"num_features": 128}),
        "reformer": reformer(length),
        "longformer": MethodSetting({"window": 129}),
        # There are no queries and keys to turn.
        NO_ATTENTION: MethodSetting(position_kind="none"),
    }


def _small_methods(length: int) -> Mapping[str, MethodSetting]:
    sizes = {"nystrom": {"num_landmarks": 32}, "skyformer": {"num_landmarks": 32}, "longformer": {"window": 33}}
    return {**_methods(length), **{name: MethodSetting(options) for name, options in sizes.items()}}


def _preset(
    task: str,
    *,
    layers: int,
    width: int,
    batch_size: int,
    steps: int,
    learning_rate: float,
    warmup_steps: int,
    evaluate_every: int,
    dropout: float = 0.1,
    weight_decay: float = 0.01,
    data: DataSizes | None = None,
) -> Preset:
    return Preset(
        task=task,
        name="modern" if data is None else "modern-small",
        source="Ma et al. 2022, arXiv:2209.10655; arXiv:2501.14850" if data is None else "nystrom",
        data=published_sizes(task) if data is None else data,
        methods=_methods if data is None else _small_methods,
        batch_size=batch_size,
        learning_rate=learning_rate,
        warmup_steps=warmup_steps,
        steps=steps,
        evaluate_every=evaluate_every,
        log_every=evaluate_every // 10,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=2 * width,
        hidden_dropout_prob=dropout,
        initializer_range=round((3 * width) ** -0.5, 4),
        position_kind="rotary",
        rotary_share=0.5,
        rotary_across_heads=True,
        short_conv_kernel_size=3,
        pooled_norm="none" if data is None else "batch",
        feed_forward="gated",
        clip_norm=1.0,
        adam_betas=(0.9, 0.98),
        weight_decay=weight_decay,
    )


MODERN: tuple[Preset, ...] = (
    _preset(
        "listops", layers=6, width=80, batch_size=64, steps=90_000, learning_rate=1e-3, warmup_steps=3_000,
        evaluate_every=1_000,
    ),
    _preset(
        "text", layers=4, width=128, batch_size=50, steps=25_000, learning_rate=4e-3, warmup_steps=10_000,
        evaluate_every=1_000,
    ),
    _preset(
        "retrieval", layers=6, width=128, batch_size=64, steps=92_000, learning_rate=1e-3, warmup_steps=10_000,
        evaluate_every=4_000, weight_decay=0.04,
    ),
    _preset(
        "image", layers=8, width=160, batch_size=50, steps=180_000, learning_rate=5e-4, warmup_steps=9_000,
        evaluate_every=3_000, dropout=0.0, weight_decay=0.02,
    ),
    _preset(
        "pathfinder", layers=6, width=128, batch_size=128, steps=250_000, learning_rate=1e-3, warmup_steps=50_000,
        evaluate_every=5_000, dropout=0.0,
    ),
    _preset(
        "listops", layers=2, width=128, batch_size=32, steps=5_000, learning_rate=1e-3, warmup_steps=500,
        evaluate_every=500,
        data=DataSizes(folder="listops-small", train=48_000, val=1_000, test=2_000, min_length=16, max_length=512),
    ),
    replace(
        _preset(
            "text", layers=2, width=128, batch_size=16, steps=5_000, learning_rate=1e-3, warmup_steps=250,
            evaluate_every=500,
            data=DataSizes(folder="text-small", train=22_500, val=2_500, test=25_000, max_length=1_000),
        ),
        short_conv_kernel_size=13, feed_forward="plain", pooling="max",
    ),
    replace(
        _preset(
            "pathfinder", layers=2, width=64, batch_size=32, steps=2_000, learning_rate=1e-3, warmup_steps=100,
            evaluate_every=200, dropout=0.0,
            data=DataSizes(
                folder="pathfinder-small", train=40_000, val=1_000, test=2_000, max_length=1_024, contour=3
            ),
        ),
        short_conv_kernel_size=65, feed_forward="plain", pooling="max",
    ),
    replace(
        _preset(
            "image", layers=2, width=64, batch_size=32, steps=5_000, learning_rate=2e-3, warmup_steps=250,
            evaluate_every=500, dropout=0.0, data=published_sizes("image"),
        ),
        short_conv_kernel_size=65, feed_forward="plain", pooling="max",
    ),
    replace(
        _preset(
            "retrieval", layers=2, width=64, batch_size=16, steps=1_000, learning_rate=1e-3, warmup_steps=100,
            evaluate_every=100,
            data=DataSizes(folder="retrieval-small", train=2_514, val=576, test=584, max_length=1_000),
        ),
        short_conv_kernel_size=13, feed_forward="plain",
    ),
)  # fmt: skip
