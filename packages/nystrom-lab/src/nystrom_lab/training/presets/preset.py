"""Presets: the data, the training and the methods' options of one task."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from nystrom.checks import Norm, PositionKind
from nystrom_lab.training.presets.recipe import Recipe
from nystrom_lab.training.presets.sizes import DataSizes


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
class Preset(Recipe):
    """Settings of one task; see `Recipe` for the optional improvements.

    Attributes:
        task: Task.
        name: Name.
        source: The paper that the settings come from.
        data: The data set.
        methods: Function from the number of positions to the settings of each method, by name.
        batch_size: Global batch size: samples per step, over all processes and accumulation steps.
        learning_rate: Peak learning rate, at the end of the warm-up.
        warmup_steps: Steps of linear warm-up.
        steps: Steps.
        evaluate_every: Steps between evaluations on the validation split, each followed by a checkpoint.
        log_every: Steps between points of the training curve; divides `evaluate_every`.
        best_after: The best checkpoint is chosen only after this share of the steps.
        clip_value: Each entry of a gradient is clipped to this size; None for no clipping.
        hidden_size: Width of a token.
        num_hidden_layers: Layers.
        num_attention_heads: Heads.
        intermediate_size: Width inside the feed-forward block.
        attention_size: Width of the queries, keys and values of all heads together; None means `hidden_size`.
        hidden_act: Activation.
        hidden_dropout_prob: Dropout.
        norm: Place of the norms.
        initializer_range: Standard deviation of the initial weights; used by the design "transformers" only.
        adam_epsilon: Epsilon of AdamW.
    """

    task: str
    name: str
    source: str
    data: DataSizes
    methods: Methods
    batch_size: int
    learning_rate: float
    warmup_steps: int
    steps: int
    evaluate_every: int
    log_every: int
    best_after: float = 0.0
    clip_value: float | None = None
    hidden_size: int = 64
    num_hidden_layers: int = 2
    num_attention_heads: int = 2
    intermediate_size: int = 128
    attention_size: int | None = None
    hidden_act: str = "gelu"
    hidden_dropout_prob: float = 0.1
    norm: Norm = "pre"
    initializer_range: float = 0.07
    adam_epsilon: float = 1e-6
