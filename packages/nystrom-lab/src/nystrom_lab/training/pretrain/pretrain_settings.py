"""The settings of a pretraining: a preset, changes to it, and the starting model."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from nystrom.checks import check_at_least
from nystrom.integrations.bert_names import longest_input
from nystrom_lab.config import Loop, PretrainOptions, Resolved
from nystrom_lab.training.hardware import processes
from nystrom_lab.training.lengths import fit_options
from nystrom_lab.training.presets import MethodSetting
from nystrom_lab.training.pretrain.presets import PretrainingPreset
from nystrom_lab.training.start import StartModel

# Of the encoder, by their names in `EncoderConfig`.
SIZES: tuple[str, ...] = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size")


@dataclass(frozen=True, kw_only=True)
class PretrainingSettings(Resolved, PretrainOptions):
    """Everything that determines the result of a pretraining, except the data; its `model` is the name of the folder.

    Attributes:
        positions: Positions of the model.
        share_projections: Whether all layers share the weights of the method.
    """

    positions: int
    share_projections: bool

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
    whole = base.steps if source is None else base.steps_from_model or base.steps
    steps = whole if asked.steps is None else asked.steps
    check_at_least("steps", steps, 1)
    every = min(base.evaluate_every, steps) if asked.evaluate_every is None else asked.evaluate_every
    values: dict[str, Any] = {entry.name: getattr(base, entry.name) for entry in fields(Loop)} | {
        "steps": steps,
        "warmup_steps": min(base.warmup_steps, int(base.warmup_steps * steps // whole)),
        "evaluate_every": every,
        "log_every": base.log_every if every % base.log_every == 0 else every,
    }
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
    given: dict[str, Any] = {entry.name: getattr(asked, entry.name) for entry in fields(PretrainOptions)}
    given |= {name: value for name, value in values.items() if given[name] is None}
    given |= _sizes(base, source, given) | {
        "attention": attention,
        "options": fit_options(attention, method.options, asked.options or {}, positions),
        "conv_kernel_size": taps,
        "model": None if source is None else Path(source.folder.name),
        "length": length,
    }
    return PretrainingSettings(
        **given,
        positions=positions,
        share_projections=method.share_projections,
        weights=None if source is None else source.weights,
        processes=processes(),
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
