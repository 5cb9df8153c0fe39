"""The settings of one run: a preset, its changes, and where it runs; checked before anything is made."""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from nystrom.checks import check_at_least, check_names
from nystrom.tasks.lra.facts import LRA
from nystrom.train.hardware import processes, usable_device, usable_precision
from nystrom.train.lengths import fit_options
from nystrom.train.presets.published import PRESETS, MethodSetting, Preset, find_preset
from nystrom.train.schedule import Schedule

if TYPE_CHECKING:
    from nystrom.models import EncoderConfig


class RunSettings(Protocol):
    """Settings of a run of any kind: a frozen dataclass, whose fields decide the result; see `Settings`."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def attention(self) -> str:
        """Method."""
        ...

    @property
    def options(self) -> Mapping[str, object]:
        """Options of the method that differ from its defaults."""
        ...

    @property
    def seed(self) -> int:
        """Of everything that is drawn."""
        ...

    @property
    def steps(self) -> int:
        """Steps."""
        ...

    @property
    def batch_size(self) -> int:
        """Samples per step, over all processes and accumulated parts."""
        ...

    @property
    def part_size(self) -> int:
        """Samples that one process takes at a time."""
        ...

    @property
    def accumulation(self) -> int:
        """Parts that a process computes its share of a batch in."""
        ...

    @property
    def processes(self) -> int:
        """Processes."""
        ...

    @property
    def learning_rate(self) -> float:
        """At the end of the warm-up."""
        ...

    @property
    def warmup_steps(self) -> int:
        """Steps of linear warm-up."""
        ...

    @property
    def evaluate_every(self) -> int:
        """Steps between evaluations and checkpoints."""
        ...

    @property
    def log_every(self) -> int:
        """Steps between points of the training curve."""
        ...

    @property
    def device(self) -> str:
        """Where it runs: "cpu" or "cuda"."""
        ...

    @property
    def precision(self) -> str:
        """What is computed in: "float32", "bfloat16" or "float16"."""
        ...

    @property
    def track_error(self) -> bool:
        """Whether the curves have the error of attention."""
        ...


@dataclass(frozen=True)
class Settings(Schedule):
    """Everything that determines the result of a run, except the data.

    Attributes:
        task: Task.
        attention: Method.
        options: Options of the method that differ from its defaults.
        conv_kernel_size: Taps of the convolution of the values; None for none.
        preset: Name of the preset.
        seed: Of the initial weights, the order of the samples, dropout and the method's draws.
        steps: Steps.
        batch_size: Samples per step, over all processes and accumulated parts.
        accumulation: Parts in which a process computes its share of a batch.
        processes: Processes.
        learning_rate: At the end of the warm-up.
        warmup_steps: Steps of linear warm-up.
        dropout: On the hidden states.
        evaluate_every: Steps between evaluations and checkpoints.
        log_every: Steps between points of the training curve.
        device: "cpu" or "cuda".
        precision: "float32", "bfloat16" or "float16".
        positions: Positions of the model; None for the preset's.
        compile: Whether the model is compiled.
        share_projections: Whether all layers share the weights of the method.
        track_error: Whether the curves have the error of attention.
    """

    task: str
    attention: str
    options: Mapping[str, object]
    conv_kernel_size: int | None
    preset: str
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
    device: str
    precision: str
    positions: int | None = None
    compile: bool = False
    share_projections: bool = False
    track_error: bool = False

    @property
    def max_length(self) -> int:
        """The longest sequence of the model: its positions."""
        return find_preset(self.task, self.preset).data.max_length if self.positions is None else self.positions

    def changes(self) -> dict[str, object]:
        """The user's changes of the preset: options of the method as "options.NAME", other settings by their name."""
        base = find_preset(self.task, self.preset)
        method = base.methods(self.max_length).get(self.attention, MethodSetting())
        before = fit_options(self.attention, method.options, {}, self.positions)
        changed = {f"options.{name}": value for name, value in self.options.items() if value != before.get(name)}
        if self.conv_kernel_size != method.conv_kernel_size:
            changed["conv_kernel_size"] = self.conv_kernel_size or 0
        plain = _preset_values(base, self.steps, self.evaluate_every)
        plain["evaluate_every"] = min(base.evaluate_every, self.steps)
        plain["steps"] = base.steps
        return changed | {name: getattr(self, name) for name, value in plain.items() if getattr(self, name) != value}

    def encoder_config(self, classes: Sequence[str] | None = None) -> "EncoderConfig":
        """The model.

        Args:
            classes: Labels of the classes of the data; None for numbers, as many as the task has.

        Raises:
            ValueError: An unknown method or option, or a value that the model cannot take.
        """
        from nystrom.models import EncoderConfig

        facts, preset = LRA[self.task], find_preset(self.task, self.preset)
        names = [str(label) for label in range(facts.num_labels)] if classes is None else classes
        return EncoderConfig(
            vocab_size=facts.vocab_size,
            id2label=dict(enumerate(names)),
            label2id={name: label for label, name in enumerate(names)},
            pad_token_id=facts.pad_token_id,
            max_position_embeddings=self.max_length,
            type_vocab_size=1,
            hidden_size=preset.hidden_size,
            num_hidden_layers=preset.num_hidden_layers,
            num_attention_heads=preset.num_attention_heads,
            intermediate_size=preset.intermediate_size,
            hidden_act=preset.hidden_act,
            hidden_dropout_prob=self.dropout,
            initializer_range=preset.initializer_range,
            norm=preset.norm,
            pooling=preset.pooling,
            attention=self.attention,
            attention_options=dict(self.options),
            share_attention_weights=self.share_projections,
            conv_kernel_size=self.conv_kernel_size,
            task=self.task,
            track_error=self.track_error,
        )


def settle(
    task: str,
    *,
    attention: str,
    options: Mapping[str, object] | None,
    conv_kernel_size: int | None,
    preset: str,
    device: str,
    precision: str,
    accumulation: int,
    seed: int,
    changes: Mapping[str, float | None],
    positions: int | None = None,
    compile: bool = False,
    track_error: bool = False,
) -> Settings:
    """Combine a preset with its changes.

    If only the steps are changed, the warm-up keeps its proportion, and the run is evaluated at least at its end. A
    shorter interval of evaluation shortens the interval of the curve.

    Args:
        task: Task.
        attention: Method.
        options: Options of the method, over those of the preset.
        conv_kernel_size: Taps of the convolution of the values; 0 for none, None for the preset's.
        preset: Name of the preset.
        device: "auto", "cpu" or "cuda".
        precision: "auto" or one of the three.
        accumulation: Parts in which a process computes its share of a batch.
        seed: Seed.
        changes: Other fields of `Settings`; None means the preset's.
        positions: Positions of the model, see `nystrom.train.lengths`; None for the preset's.
        compile: Whether the model is compiled.
        track_error: Whether the curves have the error of attention.

    Raises:
        ValueError: An unknown name, or a value that cannot be used.
    """
    import torch

    from nystrom.attention.backend import check_backend_device

    check_names("task", [task], LRA)
    base = find_preset(task, preset)
    method = base.methods(base.data.max_length if positions is None else positions).get(attention, MethodSetting())
    chosen = {name: value for name, value in changes.items() if value is not None}
    steps = chosen.get("steps", base.steps)
    check_at_least("steps", steps, 1)  # pyright: ignore[reportArgumentType]
    given = _preset_values(base, steps, chosen.get("evaluate_every"))
    assert chosen.keys() <= given.keys()
    device = usable_device(device)
    settings = Settings(
        task=task,
        attention=attention,
        options=fit_options(attention, method.options, options or {}, positions),
        conv_kernel_size=method.conv_kernel_size if conv_kernel_size is None else conv_kernel_size or None,
        preset=preset,
        seed=seed,
        accumulation=accumulation,
        processes=processes(),
        device=device,
        precision=usable_precision(precision, device),
        positions=positions,
        compile=compile,
        share_projections=method.share_projections,
        track_error=track_error,
        **(given | chosen),  # pyright: ignore[reportArgumentType]
    )
    settings.encoder_config()
    check_backend_device(settings.options.get("backend", "auto"), torch.device(device))
    return settings


def _preset_values(base: Preset, steps: float, evaluate_every: float | None) -> dict[str, float]:
    """The defaults of a run of so many steps."""
    every = min(base.evaluate_every, steps) if evaluate_every is None else evaluate_every
    return {
        "steps": steps,
        "batch_size": base.batch_size,
        "learning_rate": base.learning_rate,
        "warmup_steps": min(base.warmup_steps, int(base.warmup_steps * steps // base.steps)),
        "dropout": base.hidden_dropout_prob,
        "evaluate_every": every,
        "log_every": base.log_every if every % base.log_every == 0 else every,
    }


def differences(settings: RunSettings, before: Mapping[str, Any]) -> list[str]:
    """What differs from the settings of an earlier run, as "name is this here but was that"."""
    now = asdict(settings)
    # A run that began before a setting existed had its default.
    before = {field.name: field.default for field in fields(settings) if field.default is not MISSING} | {**before}
    return [
        f"{name} is {_shown(name, now)} but was {_shown(name, before)}"
        for name in sorted({*now, *before})
        if now.get(name) != before.get(name)
    ]


def _shown(name: str, settings: Mapping[str, Any]) -> str:
    """A setting in the user's terms: positions are not chosen, but come with the preset or with the data."""
    value = settings.get(name)
    if name != "positions":
        return repr(value)
    if value is not None:
        return f"{value} (the data's)"
    preset = PRESETS.get((settings.get("task", ""), settings.get("preset", "")))
    return "the preset's" if preset is None else f"{preset.data.max_length} (the preset's)"
