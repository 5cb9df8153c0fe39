"""The presets of pretraining, and the settings of a run: a preset, changes to it, and the starting model.

- "bert-small" and "bert-base": the paper's two models, on instances of 512 tokens: batches of 256, AdamW(0.9, 0.999) at
  1e-4 with weight decay 0.01, 10,000 steps of warm-up, then linear decay; 100,000 steps and 500,000, and for
  "bert-base" 250,000 if it starts from a trained model. 64 landmarks and a convolution of 33 taps.
- "longer": more positions for a trained model, of any size, by repeating its table: 1,024 tokens, batches of 128,
  40,000 steps at 1e-5 without a warm-up.
- "demo": ours, for an hour or less on two cores.

Source: Xiong et al. (2021), arXiv:2102.03902, section 5.1, and its supplement, sections (A) and (C).
Departs from it, or fills what it leaves open:

- the paper gives BERT-small 4 layers and no width: here it is 512 with 8 heads and 2,048 inside the feed-forward block,
  the BERT-small of Turc et al. (2019), arXiv:1908.08962;
- AdamW, whose weight decay is apart from the gradient, as in BERT's own code, instead of "Adam" with "L2 weight decay";
- gradients are clipped to a norm of 1, AdamW's epsilon is 1e-6, dropout on the hidden states 0.1 and the initial
  standard deviation 0.02, as in BERT's own code;
- attention weights are not dropped, since no method stores them;
- Linformer has its authors' 256 projections, and the weights of one layer serve all.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from nystrom.checks import check_at_least, check_names
from nystrom_lab.config import EncoderSize, Loop, Optimizer, PretrainOptions, Resolved
from nystrom_lab.training.fitted_options import fit_options
from nystrom_lab.training.hardware import processes
from nystrom_lab.training.presets import Methods, MethodSetting, linformer
from nystrom_lab.training.run_settings import in_proportion

if TYPE_CHECKING:
    from nystrom_lab.training.start import StartModel


def _methods(length: int) -> Mapping[str, MethodSetting]:
    return {
        "nystrom": MethodSetting({"num_landmarks": 64}, conv_kernel_size=33),
        "linformer": linformer(256, length),
    }


def _demo_methods(length: int) -> Mapping[str, MethodSetting]:
    return {
        # The paper has as many tokens to a landmark, and to a projection.
        "nystrom": MethodSetting({"num_landmarks": 32}, conv_kernel_size=33),
        "linformer": linformer(128, length),
    }


@dataclass(frozen=True, kw_only=True)
class PretrainingPreset(Loop, Optimizer):
    """Settings of one pretraining; sizes that are None are those of the starting model.

    Attributes:
        name: Name.
        source: The paper that the settings come from.
        length: Tokens of an instance.
        num_hidden_layers: Layers.
        hidden_size: Width of a token.
        num_attention_heads: Heads.
        intermediate_size: Width inside the feed-forward block.
        steps_from_model: Steps of a run that starts from a trained model; None for `steps`.
        lengthens: Whether the starting model gets more positions if it has fewer than `length`.
        methods: Function from the number of positions to the settings of each method, by name.
        hidden_act: Activation.
        initializer_range: Standard deviation of the initial weights.
        adam_epsilon: Epsilon of AdamW.
    """

    name: str
    source: str
    length: int
    num_hidden_layers: int | None
    hidden_size: int | None
    num_attention_heads: int | None
    intermediate_size: int | None
    steps_from_model: int | None = None
    lengthens: bool = False
    methods: Methods = _methods
    hidden_act: str = "gelu"
    initializer_range: float = 0.02
    adam_epsilon: float = 1e-6


BERT_SMALL = PretrainingPreset(
    name="bert-small",
    source="Xiong et al. 2021, arXiv:2102.03902",
    schedule="linear",
    clip_norm=1.0,
    adam_betas=(0.9, 0.999),
    weight_decay=0.01,
    length=512,
    steps=100_000,
    batch_size=256,
    learning_rate=1e-4,
    warmup_steps=10_000,
    dropout=0.1,
    evaluate_every=1_000,
    log_every=100,
    hidden_size=512,
    num_hidden_layers=4,
    num_attention_heads=8,
    intermediate_size=2048,
)
_OF_MODEL = {"hidden_size": None, "num_hidden_layers": None, "num_attention_heads": None, "intermediate_size": None}

PRETRAINING: dict[str, PretrainingPreset] = {
    preset.name: preset
    for preset in (
        BERT_SMALL,
        replace(
            BERT_SMALL,
            name="bert-base",
            steps=500_000,
            steps_from_model=250_000,
            evaluate_every=5_000,
            hidden_size=768,
            num_hidden_layers=12,
            num_attention_heads=12,
            intermediate_size=3072,
        ),
        replace(
            BERT_SMALL,
            name="longer",
            length=1024,
            steps=40_000,
            batch_size=128,
            learning_rate=1e-5,
            warmup_steps=0,
            lengthens=True,
            **_OF_MODEL,
        ),
        replace(
            BERT_SMALL,
            name="demo",
            source="nystrom",
            methods=_demo_methods,
            length=256,
            steps=2_000,
            batch_size=16,
            learning_rate=5e-4,
            warmup_steps=200,
            evaluate_every=200,
            log_every=20,
            hidden_size=256,
            num_attention_heads=4,
            intermediate_size=1024,
        ),
    )
}


def find_pretraining(name: str) -> PretrainingPreset:
    """Look up a preset.

    Raises:
        ValueError: There is no preset of that name.
    """
    check_names("preset", [name], PRETRAINING)
    return PRETRAINING[name]


# Sizes of the encoder, by their names in `EncoderConfig`.
SIZES: tuple[str, ...] = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size")


@dataclass(frozen=True, kw_only=True)
class PretrainingSettings(Resolved, Loop, EncoderSize, PretrainOptions):
    """Everything that determines the result of a pretraining, except the data; its `model` is the name of the folder.

    Attributes:
        num_positions: Positions of the model.
        share_projections: Whether all layers share the weights of the method.
    """

    num_positions: int
    share_projections: bool
    in_file: ClassVar[Mapping[str, str]] = MappingProxyType({**Resolved.in_file, "num_positions": "positions"})

    def __post_init__(self):
        super().__post_init__()
        for name in ("instances", *SIZES):
            check_at_least(name, getattr(self, name), 1)

    @classmethod
    def resolve(
        cls, options: PretrainOptions, base: PretrainingPreset, source: "StartModel | None"
    ) -> "PretrainingSettings":
        """Combine a preset with its changes and with the model that the run starts from.

        Args:
            options: The requested options, with device and precision already resolved from "auto".
            source: The model that the run starts from; None for none.

        Raises:
            ValueError: An unknown name, an invalid value, or a model that does not match.
        """
        length = base.length if options.length is None else options.length
        check_at_least("length", length, 8)
        whole = base.steps if source is None else base.steps_from_model or base.steps
        steps = whole if options.steps is None else options.steps
        check_at_least("steps", steps, 1)
        values = loop_values(base, steps, whole, options.evaluate_every)
        num_positions = _num_positions(base, source, length)
        # The attention of a BERT is exact: what takes its place is chosen as if it started from nothing.
        config = source.config if source is not None and source.own else None
        if (attention := options.attention) is None:
            attention = "nystrom" if config is None else str(config.attention)
        method = base.methods(num_positions).get(attention, MethodSetting())
        if source is not None and config is not None and config.attention == attention:
            method = source.method
        kept = None if config is None else config.conv_kernel_size
        taps = kept or method.conv_kernel_size if options.conv_kernel_size is None else options.conv_kernel_size or None
        given: dict[str, Any] = {**vars(options)}
        given |= {name: value for name, value in values.items() if given[name] is None}
        given |= _sizes(base, source, given) | {
            "attention": attention,
            "options": fit_options(attention, method.options, options.options or {}, num_positions),
            "conv_kernel_size": taps,
            "model": None if source is None else Path(source.folder.name),
            "length": length,
        }
        return cls(
            **given,
            num_positions=num_positions,
            share_projections=method.share_projections,
            fingerprint=None if source is None else source.fingerprint,
            processes=processes(),
        )


def loop_values(base: PretrainingPreset, steps: int, whole: int, evaluate_every: int | None) -> dict[str, Any]:
    """The defaults of a run, by the names of `Loop`; see `in_proportion`."""
    return {each.name: getattr(base, each.name) for each in fields(Loop)} | in_proportion(
        base, steps, whole, evaluate_every
    )


def _num_positions(base: PretrainingPreset, source: "StartModel | None", length: int) -> int:
    """The positions of the model that is trained."""
    if source is None:
        if base.lengthens:
            raise ValueError(f"preset {base.name} gives a trained model more positions: name the model with --model.")
        return length
    from nystrom.integrations.bert_names import longest_input

    num_positions = longest_input(source.config)
    if num_positions is not None and num_positions >= length:
        return num_positions
    if not base.lengthens:
        raise ValueError(
            f"model {source.folder} has {num_positions} positions but instances have {length} tokens: use --length "
            f"{num_positions}, or --preset longer, which repeats the positions."
        )
    return length


def _sizes(base: PretrainingPreset, source: "StartModel | None", sizes: Mapping[str, int | None]) -> dict[str, int]:
    """The sizes of the encoder: as requested, else the preset's, else the model's; they must equal the model's."""
    wanted: dict[str, int] = {}
    for name in SIZES:
        given, of_preset = sizes.get(name), getattr(base, name)
        value = of_preset if given is None else given
        if source is None:
            assert value is not None, "only presets that need a model leave its sizes open"
            wanted[name] = value
            continue
        wanted[name] = came = getattr(source.config, name)
        if value not in (None, came):
            flags = " ".join(f"--{size.replace('_', '-')} {getattr(source.config, size)}" for size in SIZES)
            whose = f"preset {base.name} has" if given is None else "you asked for"
            raise ValueError(
                f"model {source.folder} has {name} = {came} but {whose} {value}: name a model of these sizes, or give "
                f"those of the model: {flags}."
            )
    return wanted
