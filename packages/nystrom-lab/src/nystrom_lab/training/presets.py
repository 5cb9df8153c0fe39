"""Presets of the Long Range Arena: published settings, later ones and a demo, each a `replace()` of the plain model.

The papers share one model: 2 layers of width 64, 128 inside the feed-forward block, 2 heads of 32, pre-norm, mean
pooling, dropout 0.1; AdamW(0.9, 0.999, 1e-6) without weight decay, linear warm-up, then linear decay. Head, dropout
and initial values are those of their code, the design "authors" of `nystrom.models.design`.

Source: Xiong et al. (2021), arXiv:2102.03902, and its code's LRA/code; Chen et al. (2021), arXiv:2111.00035, and its
code's code/config.py and code/main.py.
Departs from their code:

- the mean that the head reads is over the real tokens, where theirs is over all positions, of which padding counts as
  zeros: theirs is ours times the share of real tokens, so that it depends on the padding, which no result here does;
- linear attention is divided by its sum of weights, where Nyströmformer's code has no denominator and divides by the
  square root of the positions, padding included;
- there is no dropout of attention weights, which their exact and kernelized attention have, and other methods of
  Skyformer's code too; `--drop-weights True` is that of exact and kernelized attention;
- the learning rate rises from 0 and falls to 0, where theirs rises from 1/25 of its peak and falls to 1/250,000 of it
  (torch's OneCycleLR);
- in mixed precision attention is computed in bfloat16, its inverse and its sums in float32, where theirs is computed in
  float32 as a whole; `--precision float32` computes all in float32;
- the number of Reformer's buckets is 2 n / 64 itself, where theirs is the power of two below it for n padded to a power
  of two;
- Skyformer's landmarks are drawn one from each segment, where Definition 1 of its paper draws them independently;
- the validation split is evaluated as a whole, and on long texts more rarely;
- a method without an entry in `methods` runs with its defaults.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from nystrom.attention.method_names import NO_ATTENTION, reformer_buckets
from nystrom.checks import Norm, PositionKind, check_names
from nystrom_lab.config import Arena
from nystrom_lab.data.lra.facts import LRA

# The departures above in short, for what is measured with the papers' presets.
DEPARTURES = (
    "pooling of real tokens alone, a denominator in linear attention, no dropped attention weights, a learning rate "
    "that begins and ends at 0"
)
# A departure of Skyformer's own method.
DRAWN_BY_SEGMENTS = "Skyformer's landmarks drawn by segments"


@dataclass(frozen=True, kw_only=True)
class DataSizes:
    """The data set of a preset; for a generated task, it is generated if missing.

    Attributes:
        folder: Name of its folder under data/.
        train: Samples for training.
        val: Samples for choosing the best checkpoint.
        test: Samples for the test.
        min_length: Drawn samples have more tokens than this.
        max_length: No sample, or document of one, has more tokens than this: the positions of the model.
        contour: Dashes of a long snake of Pathfinder; None for those of the published hard images.
    """

    folder: str
    train: int
    val: int
    test: int
    min_length: int = 0
    max_length: int
    contour: int | None = None


def published_sizes(task: str, *, max_length: int | None = None) -> DataSizes:
    """The published data set of a task, its texts cut at `max_length` bytes. Default: the papers'."""
    facts = LRA[task]
    return DataSizes(
        folder=task if max_length is None else f"{task}-{max_length}",
        train=facts.train,
        val=facts.val,
        test=facts.test,
        min_length=facts.min_length,
        max_length=facts.max_length if max_length is None else max_length,
    )


@dataclass(frozen=True)
class MethodSetting:
    """The settings of one attention method in a preset.

    Attributes:
        options: Options of the method; the others have the method's defaults.
        conv_kernel_size: Kernel size of the skip convolution of the values; None for none.
        share_projections: Whether all layers share the weights of the method.
        position_kind: Kind of positions that the method needs instead of the preset's; None for the preset's.
    """

    options: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))
    conv_kernel_size: int | None = None
    share_projections: bool = False
    position_kind: PositionKind | None = None


Methods = Callable[[int], Mapping[str, MethodSetting]]


@dataclass(frozen=True, kw_only=True)
class Preset(Arena):
    """Settings of one task.

    Attributes:
        task: Task.
        name: Name.
        source: The paper that the settings come from.
        data: The data set.
        methods: Function from the number of positions to the settings of each method, by name.
        best_after: The best checkpoint is chosen only after this share of the steps.
        clip_value: Each entry of a gradient is clipped to this size; None for no clipping.
        hidden_size: Width of a token.
        num_hidden_layers: Layers.
        num_attention_heads: Heads.
        intermediate_size: Width inside the feed-forward block.
        attention_size: Width of the queries, keys and values of all heads together; None means `hidden_size`.
        hidden_act: Activation.
        norm: Place of the norms.
        initializer_range: Standard deviation of the initial weights; used by the design "transformers" only.
        adam_epsilon: Epsilon of AdamW.
    """

    task: str = ""
    name: str
    source: str
    data: DataSizes = field(default_factory=lambda: DataSizes(folder="", train=0, val=0, test=0, max_length=0))
    methods: Methods
    best_after: float = 0.0
    clip_value: float | None = None
    hidden_size: int = 64
    num_hidden_layers: int = 2
    num_attention_heads: int = 2
    intermediate_size: int = 128
    attention_size: int | None = None
    hidden_act: str = "gelu"
    norm: Norm = "pre"
    initializer_range: float = 0.07
    adam_epsilon: float = 1e-6

    def of(self, task: str, **values: Any) -> "Preset":
        """The preset for a task, with its published data unless others are given."""
        return replace(self, **{"task": task, "data": published_sizes(task), **values})


def linformer(num_features: int, length: int, *, frozen: bool | None = None) -> MethodSetting:
    """Linformer as in the code of both papers: one projection per head, for keys and values.

    Nyströmformer's code trains it and shares it between layers; Skyformer's keeps it fixed at its random initial
    values, one per layer.

    Args:
        frozen: Whether it stays fixed at its random initial values, as in Skyformer's code; None outside the design
            "authors".
    """
    options = {
        "num_features": num_features,
        "max_length": length,
        "per_head": True,
        "share_key_value": True,
        "init_std": 0.02,
    }
    return MethodSetting(options if frozen is None else options | {"frozen": frozen}, share_projections=not frozen)


def reformer(length: int) -> MethodSetting:
    """Reformer as in the code of both papers: 2 n / 64 buckets, and queries attend across them."""
    return MethodSetting(
        {"num_hashes": 2, "chunk_size": 64, "num_buckets": reformer_buckets(length), "across_buckets": True}
    )


def _of_nystromformer(length: int) -> Mapping[str, MethodSetting]:
    return {
        "nystrom": MethodSetting({"num_landmarks": 128, "pinv_steps": 6}, conv_kernel_size=35),
        "linformer": linformer(256, length, frozen=False),
        "performer": MethodSetting({"num_features": 256}),
        "reformer": reformer(length),
        "linear": MethodSetting({"feature_map": "elu"}),
    }


def _of_skyformer(length: int) -> Mapping[str, MethodSetting]:
    return {
        "nystrom": MethodSetting({"num_landmarks": 128, "pinv_steps": 6}),
        "skyformer": MethodSetting({"num_landmarks": 128, "gamma": 0.1, "pinv_steps": 6}),
        "linformer": linformer(128, length, frozen=True),
        "performer": MethodSetting({"num_features": 128}),
        "reformer": reformer(length),
        "bigbird": MethodSetting({"block_size": 64, "num_random_blocks": 3}),
        "informer": MethodSetting({"num_queries": 128, "num_samples": 128}),
    }


def _of_official(length: int) -> Mapping[str, MethodSetting]:
    return {"linformer": linformer(128, length), "reformer": reformer(length)}


def _of_modern(length: int) -> Mapping[str, MethodSetting]:
    return {
        "nystrom": MethodSetting({"num_landmarks": 128}),
        "skyformer": MethodSetting({"num_landmarks": 128}),
        "linformer": linformer(128, length),
        "performer": MethodSetting({"num_features": 128}),
        "reformer": reformer(length),
        "longformer": MethodSetting({"window": 129}),
        # The model has no queries and keys to rotate.
        NO_ATTENTION: MethodSetting(position_kind="none"),
    }


def _of_modern_small(length: int) -> Mapping[str, MethodSetting]:
    sizes = {"nystrom": {"num_landmarks": 32}, "skyformer": {"num_landmarks": 32}, "longformer": {"window": 33}}
    return {**_of_modern(length), **{name: MethodSetting(options) for name, options in sizes.items()}}


def _of_demo(length: int) -> Mapping[str, MethodSetting]:
    return {
        "nystrom": MethodSetting({"num_landmarks": 32}, conv_kernel_size=35),
        "skyformer": MethodSetting({"num_landmarks": 32}),
    }


# Nyströmformer's code lists 32, 64, 128 and 256 landmarks for every task, and the paper does not say which of them its
# table is for: here it is 128; `nystrom lra run --methods nystrom-64` chooses another number.
NYSTROMFORMER = Preset(
    name="nystromformer",
    source="Xiong et al. 2021, arXiv:2102.03902",
    methods=_of_nystromformer,
    position_kind="learned",
    rotary_share=1.0,
    rotary_across_heads=False,
    short_conv_kernel_size=0,
    pooling="mean",
    pooled_norm="none",
    feed_forward="plain",
    design="authors",
    drop_weights=False,
    schedule="linear",
    clip_norm=0.0,
    adam_betas=(0.9, 0.999),
    weight_decay=0.0,
    label_smoothing=0.0,
    augment=False,
    denoise=0.0,
    batch_size=32,
    learning_rate=1e-4,
    dropout=0.1,
    # Each task sets its own.
    steps=0,
    warmup_steps=0,
    evaluate_every=0,
    log_every=0,
)
# Text has the batch of the paper, 16; its code has 32.
SKYFORMER = replace(
    NYSTROMFORMER,
    name="skyformer",
    source="Chen et al. 2021, arXiv:2111.00035",
    methods=_of_skyformer,
    batch_size=16,
    steps=50_000,
    evaluate_every=500,
    log_every=100,
    best_after=0.2,
    clip_value=1.0,
)
# Encoders without the parts of the authors' code.
PLAIN = replace(NYSTROMFORMER, design="transformers")

# A first look at each task: few steps on short sequences, for a few minutes on two cores. With initial weights and
# learning rates larger than the papers', training leaves its initial plateau sooner; on Text the plateau still lasts
# longer than 1,000 steps. Images cannot be made shorter, so Image and Pathfinder use smaller batches and fewer steps.
# The validation splits of Text and Retrieval are large, so they are evaluated rarely.
DEMO = replace(
    PLAIN,
    name="demo",
    source="nystrom",
    methods=_of_demo,
    learning_rate=1e-3,
    warmup_steps=100,
    steps=1_000,
    evaluate_every=1_000,
    log_every=20,
    initializer_range=0.1,
)
_DRAWN = {"train": 16_000, "val": 1_000, "test": 2_000}


def _demo_texts(task: str) -> DataSizes:
    """The published texts of a task, cut at 512 bytes."""
    return replace(published_sizes(task, max_length=512), folder=f"{task}-demo")


# The settings of the official code of the Long Range Arena, for its Transformer. The published rates are multiplied by
# the inverse root of the step: 0.05 at step s is 0.05 / sqrt(max(s, warm-up)), that is 0.05 / sqrt(warm-up) at the end
# of the warm-up. Retrieval's warm-up of 8,000 steps is longer than its 5,000 steps; a warm-up of 4,999 steps to the
# rate of that step is the same.
#
# Source: Tay et al. (2021), arXiv:2011.04006, and its code's lra_benchmarks/*/configs.
# Departs from that code: positions are learned on all tasks, where its texts, ListOps and Pathfinder have sines; each
# layer has its own weights, where its ListOps has shared ones; biases and norms do not decay; no dropout of attention
# weights; the validation split is evaluated as a whole, more rarely. `nystrom.models.design` describes the model. The
# code came in versions: others have 6 layers, 2,048 inside, for ListOps, and width 32 with one head for Image.
OFFICIAL = replace(
    PLAIN,
    name="official",
    source="Tay et al. 2021, arXiv:2011.04006",
    methods=_of_official,
    design="official",
    pooling="cls",
    adam_betas=(0.9, 0.98),
    adam_epsilon=1e-9,
)


def _official(task: str, width: int, heads: int, layers: int, inner: int, every: int, **others: Any) -> Preset:
    sizes = {"hidden_size": width, "num_attention_heads": heads, "num_hidden_layers": layers}
    sizes |= {"intermediate_size": inner, "evaluate_every": every, "log_every": every // 10}
    return OFFICIAL.of(task, **sizes, **others)


def _rsqrt(warmup: int, steps: int) -> dict[str, Any]:
    """The rate 0.05, with a warm-up that ends before training does."""
    end = min(warmup, steps - 1)
    rate = 0.05 * warmup**-0.5 * end / warmup
    return {"learning_rate": rate, "warmup_steps": end, "steps": steps, "schedule": "rsqrt", "weight_decay": 0.1}


def _cosine(rate: float, batches: int) -> dict[str, Any]:
    """200 passes of `batches` batches, the first of which is the warm-up."""
    return {"learning_rate": rate, "warmup_steps": batches, "steps": 200 * batches, "schedule": "cosine"}


# Improvements in one model: rotary positions, short convolutions, gates, clipping. The sequence stays one-dimensional:
# positions and convolutions are not those of images.
#
# "modern" has MEGA's layers, widths, batches, steps, warm-up, dropout and weight decay, its clipping by a norm of 1,
# its betas and its linear decay; the heads, the rates and the positions of arXiv:2501.14850, whose model is attention;
# the short convolutions of So et al., and the gate of Shazeer (GEGLU). All methods have the same model around them and
# no convolution of the values, so that runs differ only in the attention. Augmentation and denoising are optional:
# `--augment True --denoise 1`.
#
# Source: Ma et al. (2022), arXiv:2209.10655; arXiv:2501.14850; So et al. (2021), arXiv:2109.08668; Shazeer (2020),
# arXiv:2002.05202.
# Departs from MEGA: attention in place of its layer, and the learning rates; weights start with the standard deviation
# of torch's linear layers. From arXiv:2501.14850: MEGA's steps in place of its epochs, no dropped learning rates, no
# corruption or augmentation unless requested.
MODERN = replace(
    PLAIN,
    name="modern",
    source="Ma et al. 2022, arXiv:2209.10655; arXiv:2501.14850",
    methods=_of_modern,
    position_kind="rotary",
    rotary_share=0.5,
    rotary_across_heads=True,
    short_conv_kernel_size=3,
    feed_forward="gated",
    clip_norm=1.0,
    adam_betas=(0.9, 0.98),
    weight_decay=0.01,
    num_attention_heads=4,
)
# Ours, for one core: the same parts, the pooled tokens normed over the batch, and two layers, on ListOps of 16 to 512
# tokens and on texts of 1,000 bytes. Texts have convolutions of 13 bytes, plain blocks, and a head that reads the
# largest value of each channel. Validation texts are held out of the training texts, so that few of them are evaluated:
#
#     nystrom data prepare text --from aclImdb --max-length 1000 --val-share 0.1 --to data/text-small
#
# On Pathfinder, of pictures with short snakes, the width is 64, and convolutions of 65 pixels reach the rows above and
# below. It is meant to start from an encoder that has learned masked pictures (`nystrom pretrain pathfinder`). Image
# has the model of Pathfinder, the published pictures, and random weights to start from. Retrieval has the convolutions
# of Text with the mean of the tokens, and the first 1,000 bytes of each document of a set as small as ScisummNet's:
#
#     nystrom data prepare retrieval --from scisummnet --max-length 1000 --to data/retrieval-small
#
# With Nyström attention it has been trained to its end on each task, once (docs/long-range-arena-measured.md); "modern"
# has not.
MODERN_SMALL = replace(
    MODERN, name="modern-small", source="nystrom", methods=_of_modern_small, pooled_norm="batch", batch_size=32
)


def _modern(
    task: str, steps: int, warmup: int, every: int, layers: int = 2, width: int = 64, *, base: Preset, **others: Any
) -> Preset:
    sizes = {"num_hidden_layers": layers, "hidden_size": width, "intermediate_size": 2 * width}
    sizes |= {"steps": steps, "warmup_steps": warmup, "evaluate_every": every, "log_every": every // 10}
    rate = {"learning_rate": 1e-3, "initializer_range": round((3 * width) ** -0.5, 4)}
    return base.of(task, **sizes, **(rate | others))


def _modern_small(task: str, steps: int, warmup: int, every: int, **others: Any) -> Preset:
    return _modern(task, steps, warmup, every, base=MODERN_SMALL, **others)


_TEXT = {"steps": 20_000, "warmup_steps": 8_000, "evaluate_every": 1_000, "log_every": 100}
_SKY_TEXT = {"warmup_steps": 80, "evaluate_every": 2_500}
# The Nyströmformer's paper says 4K, but its released code cuts a review at 1,000 bytes (LRA/datasets/text.py).
_CUT = published_sizes("text", max_length=1_000)
_SHORT = {"feed_forward": "plain", "short_conv_kernel_size": 13}
_PIXELS = {"feed_forward": "plain", "short_conv_kernel_size": 65, "pooling": "max", "dropout": 0.0}

PRESETS: dict[tuple[str, str], Preset] = {
    (preset.task, preset.name): preset
    for preset in (
        NYSTROMFORMER.of("listops", steps=5_000, warmup_steps=1_000, evaluate_every=50, log_every=50),
        NYSTROMFORMER.of("text", **_TEXT),
        NYSTROMFORMER.of("text", **_TEXT, data=_CUT, name="nystromformer-1000"),
        NYSTROMFORMER.of("retrieval", steps=30_000, warmup_steps=800, evaluate_every=1_500, log_every=100),
        NYSTROMFORMER.of("image", steps=35_000, warmup_steps=175, evaluate_every=175, log_every=175, batch_size=256),
        NYSTROMFORMER.of(
            "pathfinder", steps=62_400, warmup_steps=312, evaluate_every=312, log_every=104, batch_size=256
        ),
        SKYFORMER.of("listops", warmup_steps=1_000, batch_size=32),
        SKYFORMER.of("text", **_SKY_TEXT),
        SKYFORMER.of("text", **_SKY_TEXT, data=_CUT, name="skyformer-1000"),
        SKYFORMER.of("retrieval", warmup_steps=800, learning_rate=2e-4, evaluate_every=2_500),
        SKYFORMER.of("image", warmup_steps=175, batch_size=256, evaluate_every=250, log_every=50),
        SKYFORMER.of("pathfinder", warmup_steps=312, batch_size=128, learning_rate=2e-4),
        _modern("listops", 90_000, 3_000, 1_000, 6, 80, base=MODERN, batch_size=64),
        _modern("text", 25_000, 10_000, 1_000, 4, 128, base=MODERN, batch_size=50, learning_rate=4e-3),
        _modern("retrieval", 92_000, 10_000, 4_000, 6, 128, base=MODERN, batch_size=64, weight_decay=0.04),
        _modern(
            "image", 180_000, 9_000, 3_000, 8, 160, base=MODERN, batch_size=50, learning_rate=5e-4, dropout=0.0,
            weight_decay=0.02,
        ),
        _modern("pathfinder", 250_000, 50_000, 5_000, 6, 128, base=MODERN, batch_size=128, dropout=0.0),
        _modern_small(
            "listops", 5_000, 500, 500, width=128,
            data=DataSizes(folder="listops-small", train=48_000, val=1_000, test=2_000, min_length=16, max_length=512),
        ),
        _modern_small(
            "text", 5_000, 250, 500, width=128, batch_size=16, pooling="max", **_SHORT,
            data=DataSizes(folder="text-small", train=22_500, val=2_500, test=25_000, max_length=1_000),
        ),
        _modern_small(
            "pathfinder", 2_000, 100, 200, **_PIXELS,
            data=DataSizes(folder="pathfinder-small", train=40_000, val=1_000, test=2_000, max_length=1_024, contour=3),
        ),
        _modern_small("image", 5_000, 250, 500, learning_rate=2e-3, **_PIXELS),
        _modern_small(
            "retrieval", 1_000, 100, 100, batch_size=16, **_SHORT,
            data=DataSizes(folder="retrieval-small", train=2_514, val=576, test=584, max_length=1_000),
        ),
        _official("listops", 512, 8, 4, 1_024, 500, **_rsqrt(1_000, 5_000)),
        _official("text", 256, 4, 4, 1_024, 1_000, **_rsqrt(8_000, 20_000), data=_CUT),
        _official("retrieval", 128, 4, 4, 512, 500, **_rsqrt(8_000, 5_000)),
        _official("image", 128, 8, 1, 128, 350, **_cosine(5e-4, 175), batch_size=256, attention_size=64),
        _official(
            "pathfinder", 128, 4, 1, 128, 3_120, **_cosine(1e-3, 312), batch_size=512, attention_size=64,
            pooling="mean", dropout=0.2,
        ),
        DEMO.of(
            "listops", steps=700, evaluate_every=100, learning_rate=2e-3,
            data=DataSizes(folder="listops-demo", **_DRAWN, min_length=16, max_length=512),
        ),
        DEMO.of("text", steps=3_000, data=_demo_texts("text")),
        DEMO.of("retrieval", batch_size=16, data=_demo_texts("retrieval")),
        DEMO.of("image", evaluate_every=500),
        DEMO.of(
            "pathfinder", evaluate_every=500,
            data=replace(published_sizes("pathfinder"), folder="pathfinder-demo", **_DRAWN),
        ),
    )
}  # fmt: skip


def find_preset(task: str, name: str) -> Preset:
    """Look up a preset.

    Raises:
        ValueError: The task has no presets, or none of that name.
    """
    check_names("task", [task], sorted({task for task, _ in PRESETS}))
    check_names("preset", [name], [preset for of, preset in PRESETS if of == task])
    return PRESETS[task, name]
