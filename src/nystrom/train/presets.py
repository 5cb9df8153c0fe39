"""Published settings, and one for a first look, as Python values.

`PRESETS` is keyed by task and name. "nystromformer" and "skyformer" are the settings of the two papers' code for the
Long Range Arena: batch, learning rate, warm-up, steps, how often to evaluate, and what each method is given. "demo" is
ours: short sequences and few steps, for two cores and a few minutes; its larger start weights leave sooner the plateau
that training begins on.

The papers share one model: 2 layers of width 64, 128 inside the feed-forward block, 2 heads of 32, pre-norm, mean
pooling, dropout 0.1; AdamW(0.9, 0.999, 1e-6) without weight decay, linear warm-up from zero, then linear decay to zero.

Source: Xiong et al. (2021), arXiv:2102.03902, and its code's LRA/code/lra_config.py; Chen et al. (2021),
arXiv:2111.00035, and its code's code/config.py and code/main.py.
Departs from their code: attention weights are not dropped (only their exact attention did that); the classification
head has 64 units and the model's activation where theirs has 128 and ReLU; there is no dropout inside the feed-forward
block; all weights start with one deviation, that of torch's own start at width 64, embeddings too; a method without an
entry in `methods` runs with its defaults.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from nystrom.shapes import check_names


@dataclass(frozen=True)
class DataSizes:
    """The data set that a preset prepares when there is none.

    Attributes:
        folder: Where, under data/.
        train: Samples for training.
        val: Samples to choose the best checkpoint by.
        test: Samples for the test.
        min_length: Samples are longer than this many tokens.
        max_length: Samples are shorter than this many tokens: the positions of the model.
    """

    folder: str
    train: int
    val: int
    test: int
    min_length: int
    max_length: int


@dataclass(frozen=True)
class MethodSetting:
    """What a preset gives to one attention method.

    Attributes:
        options: Options of the method; the others have the method's defaults.
        conv_kernel_size: Size of the convolution of the values; None for none.
    """

    options: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))
    conv_kernel_size: int | None = None


@dataclass(frozen=True)
class Preset:
    """Settings of one task.

    Attributes:
        task: Task.
        name: Name.
        source: Whose settings.
        data: The data set.
        batch_size: Samples per step, over all processes and accumulated parts.
        learning_rate: At the end of the warm-up.
        warmup_steps: Steps of linear warm-up.
        steps: Steps.
        evaluate_every: Steps between evaluations on the validation split, each followed by a checkpoint.
        log_every: Steps between points of the training curve; divides `evaluate_every`.
        best_after: The best checkpoint is chosen after this share of the steps.
        clip_value: Each entry of a gradient is clipped to this size; None for no clipping.
        methods: What a method is given, by its name.
        hidden_size: Width of a token.
        num_hidden_layers: Layers.
        num_attention_heads: Heads.
        intermediate_size: Width inside the feed-forward block.
        hidden_act: Activation.
        hidden_dropout_prob: Dropout.
        norm: Place of the norms.
        pooling: What the classification head reads.
        initializer_range: Standard deviation of the start weights.
        adam_betas: Of AdamW.
        adam_epsilon: Of AdamW.
        weight_decay: Of AdamW.
    """

    task: str
    name: str
    source: str
    data: DataSizes
    batch_size: int
    learning_rate: float
    warmup_steps: int
    steps: int
    evaluate_every: int
    log_every: int
    best_after: float = 0.0
    clip_value: float | None = None
    methods: Mapping[str, MethodSetting] = field(default_factory=lambda: MappingProxyType({}))
    hidden_size: int = 64
    num_hidden_layers: int = 2
    num_attention_heads: int = 2
    intermediate_size: int = 128
    hidden_act: str = "gelu"
    hidden_dropout_prob: float = 0.1
    norm: Literal["post", "pre"] = "pre"
    pooling: Literal["mean", "first"] = "mean"
    initializer_range: float = 0.07
    adam_betas: tuple[float, float] = (0.9, 0.999)
    adam_epsilon: float = 1e-6
    weight_decay: float = 0.0


_LISTOPS = DataSizes(folder="listops", train=96_000, val=2_000, test=2_000, min_length=500, max_length=2_000)
_LISTOPS_DEMO = DataSizes(folder="listops-demo", train=16_000, val=1_000, test=2_000, min_length=16, max_length=512)

PRESETS: dict[tuple[str, str], Preset] = {
    ("listops", "nystromformer"): Preset(
        task="listops",
        name="nystromformer",
        source="Xiong et al. 2021, arXiv:2102.03902",
        data=_LISTOPS,
        batch_size=32,
        learning_rate=1e-4,
        warmup_steps=1_000,
        steps=5_000,
        evaluate_every=50,
        log_every=50,
        methods={
            "nystrom": MethodSetting({"num_landmarks": 128, "pinv_steps": 6}, conv_kernel_size=35),
            "linformer": MethodSetting({"num_features": 256, "max_length": 2_000}),
            "performer": MethodSetting({"num_features": 256}),
            "reformer": MethodSetting({"num_hashes": 2, "chunk_size": 64}),
            "linear": MethodSetting({"feature_map": "elu"}),
        },
    ),
    ("listops", "skyformer"): Preset(
        task="listops",
        name="skyformer",
        source="Chen et al. 2021, arXiv:2111.00035",
        data=_LISTOPS,
        batch_size=32,
        learning_rate=1e-4,
        warmup_steps=1_000,
        steps=50_000,
        evaluate_every=500,
        log_every=100,
        best_after=0.2,
        clip_value=1.0,
        methods={
            "nystrom": MethodSetting({"num_landmarks": 128, "pinv_steps": 6}),
            "skyformer": MethodSetting({"num_landmarks": 128, "gamma": 0.1, "pinv_steps": 6}),
            "linformer": MethodSetting({"num_features": 128, "max_length": 2_000}),
            "performer": MethodSetting({"num_features": 128}),
            "reformer": MethodSetting({"num_hashes": 2, "chunk_size": 64}),
            "bigbird": MethodSetting({"block_size": 64, "num_random_blocks": 3}),
            "informer": MethodSetting({"num_queries": 128, "num_samples": 128}),
        },
    ),
    ("listops", "demo"): Preset(
        task="listops",
        name="demo",
        source="nystrom",
        data=_LISTOPS_DEMO,
        batch_size=32,
        learning_rate=2e-3,
        warmup_steps=100,
        steps=700,
        evaluate_every=100,
        log_every=20,
        initializer_range=0.1,
        methods={
            "nystrom": MethodSetting({"num_landmarks": 32}, conv_kernel_size=35),
            "skyformer": MethodSetting({"num_landmarks": 32}),
        },
    ),
}


def find_preset(task: str, name: str) -> Preset:
    """Look a preset up.

    Raises:
        ValueError: There is none for the task, or none of that name.
    """
    check_names("task", [task], sorted({task for task, _ in PRESETS}))
    check_names("preset", [name], [preset for of, preset in PRESETS if of == task])
    return PRESETS[task, name]
