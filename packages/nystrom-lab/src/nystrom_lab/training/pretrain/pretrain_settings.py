"""The settings of a pretraining: a preset, changes to it, and the starting model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nystrom.checks import check_at_least
from nystrom.integrations.bert_names import longest_input
from nystrom_lab.training.hardware import processes
from nystrom_lab.training.lengths import fit_options
from nystrom_lab.training.options import PretrainOptions
from nystrom_lab.training.presets.preset import MethodSetting
from nystrom_lab.training.presets.pretraining import PretrainingPreset
from nystrom_lab.training.schedule import Schedule
from nystrom_lab.training.start import StartModel

# Of the encoder, by their names in `EncoderConfig`.
SIZES: tuple[str, ...] = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size")


@dataclass(frozen=True)
class PretrainingSettings(Schedule):
    """Everything that determines the result of a pretraining, except the data.

    Attributes:
        preset: Name of the preset.
        attention: Method.
        options: Options of the method that differ from its defaults.
        conv_kernel_size: Kernel size of the skip convolution of the values; None for none.
        share_projections: Whether all layers share the weights of the method.
        model: Name of the model that it starts from; None for none.
        weights: Checksum of that model's weights; None if it starts from scratch.
        length: Tokens of an instance.
        positions: Positions of the model.
        num_hidden_layers: Layers.
        hidden_size: Width of a token.
        num_attention_heads: Heads.
        intermediate_size: Width inside the feed-forward block.
        seed: Seed of the initial weights, the instances, their order, dropout and the method's draws.
        steps: Steps.
        batch_size: Global batch size: instances per step, over all processes and accumulation steps.
        accumulation: Gradient-accumulation steps.
        processes: Processes.
        learning_rate: Peak learning rate, at the end of the warm-up.
        warmup_steps: Steps of linear warm-up.
        dropout: Dropout on the hidden states.
        evaluate_every: Steps between evaluations and checkpoints.
        log_every: Steps between points of the training curve.
        instances: Maximum number of held-out instances per evaluation.
        device: "cpu" or "cuda".
        precision: "float32", "bfloat16" or "float16".
        compile: Whether the encoder is compiled.
        context_parallel: Processes that split the tokens of each sample (context parallelism).
    """

    preset: str
    attention: str
    options: Mapping[str, object]
    conv_kernel_size: int | None
    share_projections: bool
    model: str | None
    weights: str | None
    length: int
    positions: int
    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    seed: int
    steps: int
    batch_size: int
    accumulation: int
    processes: int
    learning_rate: float
    warmup_steps: int
    dropout: float
    evaluate_every: int
    log_every: int
    instances: int
    device: str
    precision: str
    compile: bool = False
    context_parallel: int = 1

    def __post_init__(self):
        super().__post_init__()
        for name in ("instances", *SIZES):
            check_at_least(name, getattr(self, name), 1)


def settle(base: PretrainingPreset, source: StartModel | None, asked: PretrainOptions) -> PretrainingSettings:
    """Combine a preset with its changes and with the model that the run starts from.

    If only the steps are changed, the warm-up keeps its proportion, and the run is evaluated at least at its end.

    Args:
        base: The preset.
        source: The model that it starts from; None for none.
        asked: The requested options, with device and precision already resolved from "auto".

    Raises:
        ValueError: An unknown name, an invalid value, or a model that does not match.
    """
    length = base.length if asked.length is None else asked.length
    check_at_least("length", length, 8)
    chosen: dict[str, Any] = {name: value for name, value in asked.changes().items() if value is not None}
    whole = base.steps if source is None else base.steps_from_model
    steps = chosen.get("steps", whole)
    check_at_least("steps", steps, 1)
    every = chosen.get("evaluate_every", min(base.evaluate_every, steps))
    given: dict[str, Any] = {
        "steps": steps,
        "batch_size": base.batch_size,
        "learning_rate": base.learning_rate,
        "warmup_steps": min(base.warmup_steps, int(base.warmup_steps * steps // whole)),
        "dropout": base.hidden_dropout_prob,
        "evaluate_every": every,
        "log_every": base.log_every if every % base.log_every == 0 else every,
    }
    assert chosen.keys() <= given.keys()
    positions = _positions(base, source, length)
    # The attention of a BERT is exact: what takes its place is chosen as if it started from nothing.
    config = source.config if source is not None and source.own else None
    if (attention := asked.attention) is None:
        attention = "nystrom" if config is None else str(config.attention)
    method = base.methods(positions).get(attention, MethodSetting())
    if source is not None and config is not None and config.attention == attention:
        method = source.method
    kept = None if config is None else config.conv_kernel_size
    taps = kept or method.conv_kernel_size if asked.conv_kernel_size is None else asked.conv_kernel_size or None
    return PretrainingSettings(
        preset=base.name,
        attention=attention,
        options=fit_options(attention, method.options, asked.options or {}, positions),
        conv_kernel_size=taps,
        share_projections=method.share_projections,
        model=None if source is None else source.folder.name,
        weights=None if source is None else source.weights,
        length=length,
        positions=positions,
        **_sizes(base, source, {name: getattr(asked, name) for name in SIZES}),
        seed=asked.seed,
        accumulation=asked.accumulation,
        processes=processes(),
        instances=asked.instances,
        device=asked.device,
        precision=asked.precision,
        compile=asked.compile,
        context_parallel=asked.context_parallel,
        **(given | chosen),
    )


def _positions(base: PretrainingPreset, source: StartModel | None, length: int) -> int:
    """The positions of the model that is trained."""
    if source is None:
        if base.lengthens:
            raise ValueError(f"preset {base.name} gives a trained model more positions: name the model with --model.")
        return length
    positions = longest_input(source.config)
    if positions is not None and positions >= length:
        return positions
    if not base.lengthens:
        raise ValueError(
            f"model {source.folder} has {positions} positions but instances have {length} tokens: use --length "
            f"{positions}, or --preset longer, which repeats the positions."
        )
    return length


def _sizes(base: PretrainingPreset, source: StartModel | None, sizes: Mapping[str, int | None]) -> dict[str, int]:
    """The sizes of the encoder: as requested, else the preset's, else the model's; they must equal the model's."""
    wanted: dict[str, int] = {}
    for name in SIZES:
        asked, of_preset = sizes.get(name), getattr(base, name)
        value = of_preset if asked is None else asked
        if source is None:
            assert value is not None, "only presets that need a model leave its sizes open"
            wanted[name] = value
            continue
        wanted[name] = came = getattr(source.config, name)
        if value not in (None, came):
            flags = " ".join(f"--{size.replace('_', '-')} {getattr(source.config, size)}" for size in SIZES)
            whose = f"preset {base.name} has" if asked is None else "you asked for"
            raise ValueError(
                f"model {source.folder} has {name} = {came} but {whose} {value}: name a model of these sizes, or give "
                f"those of the model: {flags}."
            )
    return wanted
