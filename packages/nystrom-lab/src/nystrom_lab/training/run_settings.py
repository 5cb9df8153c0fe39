"""The settings of one run: a preset, its changes, and where it runs; checked before anything is created."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from nystrom.attention.method_names import DROPS_WEIGHTS
from nystrom.checks import check_at_least, check_names
from nystrom_lab.data.lra.facts import LRA
from nystrom_lab.training.hardware import processes, usable_device, usable_precision
from nystrom_lab.training.lengths import attended, fit_options
from nystrom_lab.training.options import TrainOptions
from nystrom_lab.training.presets.published import PRESETS, MethodSetting, Preset, find_preset
from nystrom_lab.training.presets.recipe import ARGUMENTS, RECIPE, Recipe
from nystrom_lab.training.schedule import RunSettings, Schedule

if TYPE_CHECKING:
    from nystrom.models import EncoderConfig
    from nystrom_lab.training.encoder_start import StartEncoder


@dataclass(frozen=True)
class Settings(Recipe, Schedule):
    """Everything that determines the result of a run, except the data; see `Recipe` for more of it.

    Attributes:
        task: Task.
        attention: Method.
        options: Options of the method that differ from its defaults.
        conv_kernel_size: Kernel size of the skip convolution of the values; None for none.
        preset: Name of the preset.
        seed: Seed of the initial weights, the order of the samples, dropout and the method's draws.
        steps: Steps.
        batch_size: Global batch size: samples per step, over all processes and accumulation steps.
        accumulation: Gradient-accumulation steps.
        processes: Processes.
        learning_rate: Peak learning rate, at the end of the warm-up.
        warmup_steps: Steps of linear warm-up.
        dropout: Dropout on the hidden states.
        evaluate_every: Steps between evaluations and checkpoints.
        log_every: Steps between points of the training curve.
        device: "cpu" or "cuda".
        precision: "float32", "bfloat16" or "float16".
        positions: Number of positions of the model; None for the preset's.
        compile: Whether the model is compiled.
        share_projections: Whether all layers share the weights of the method.
        mask_share: Share of the tokens that are masked and predicted; 0 if the class is predicted.
        model: Folder of the encoder that the run starts from; None if it starts from scratch.
        weights: Checksum of that encoder's weights.
        context_parallel: Processes that split the tokens of each sample (context parallelism).
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
    mask_share: float = 0.0
    model: str | None = None
    weights: str | None = None
    context_parallel: int = 1

    def __post_init__(self):
        super().__post_init__()
        self.check_recipe()
        # Masked inputs are learned without a head.
        if self.pooled_norm != "none" and self.part_size == 1 and self.mask_share == 0:
            raise ValueError(
                f"pooled_norm is {self.pooled_norm!r}, but a process computes one sample at a time, which has no "
                "variance: use a larger batch_size or a smaller accumulation, or pooled_norm 'none'."
            )
        if not 0 <= self.mask_share < 1:
            raise ValueError(f"mask_share is {self.mask_share!r}; expected a number in [0, 1), 0 to learn the class.")

    @property
    def max_length(self) -> int:
        """The longest sequence of the model: its positions."""
        return find_preset(self.task, self.preset).data.max_length if self.positions is None else self.positions

    def changes(self) -> dict[str, object]:
        """The user's changes to the preset: options of the method as "options.NAME", other settings by name."""
        base = find_preset(self.task, self.preset)
        method = base.methods(self.max_length).get(self.attention, MethodSetting())
        before = fit_options(self.attention, method.options, {}, attended(base, self.positions, self.pooling))
        changed = {f"options.{name}": value for name, value in self.options.items() if value != before.get(name)}
        if self.conv_kernel_size != method.conv_kernel_size:
            changed["conv_kernel_size"] = self.conv_kernel_size or 0
        plain = _preset_values(base, method, self.position_kind, self.steps, self.evaluate_every)
        plain["position_kind"] = method.position_kind or base.position_kind
        plain["evaluate_every"] = min(base.evaluate_every, self.steps)
        plain["steps"] = base.steps
        differ = {name: getattr(self, name) for name, value in plain.items() if getattr(self, name) != value}
        return changed | {ARGUMENTS.get(name, name): value for name, value in differ.items()}

    def encoder_config(self, classes: Sequence[str] | None = None) -> "EncoderConfig":
        """The model.

        Args:
            classes: Labels of the classes of the data; None for the task's numbers.

        Raises:
            ValueError: An unknown method or option, or a value that the model does not support.
        """
        from nystrom.models import EncoderConfig

        facts, preset = LRA[self.task], find_preset(self.task, self.preset)
        drops_weights = self.drop_weights and self.attention in DROPS_WEIGHTS
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
            attention_probs_dropout_prob=self.dropout if drops_weights else 0.0,
            initializer_range=preset.initializer_range,
            norm=preset.norm,
            pooling=self.pooling,
            pooled_norm=self.pooled_norm,
            positions=self.position_kind,
            rotary_share=self.rotary_share,
            rotary_across_heads=self.rotary_across_heads,
            short_conv_kernel_size=self.short_conv_kernel_size or None,
            feed_forward=self.feed_forward,
            design=self.design,
            attention_size=preset.attention_size,
            attention=self.attention,
            attention_options=dict(self.options),
            share_attention_weights=self.share_projections,
            conv_kernel_size=self.conv_kernel_size,
            task=self.task,
        )


def settle(
    asked: TrainOptions,
    *,
    positions: int | None = None,
    start: "StartEncoder | None" = None,
    elsewhere: bool = False,
) -> Settings:
    """Combine a preset with its changes, and with the encoder that the run starts from.

    If only the steps are changed, the warm-up keeps its proportion, and the run is evaluated at least at its end. A
    shorter interval of evaluation shortens the interval of the curve.

    Args:
        asked: The requested options; the preset is not None.
        positions: Number of positions of the model, see `nystrom_lab.training.lengths`; None for the preset's.
        start: The encoder that the run starts from, with its settings; None for none.
        elsewhere: Whether the run is for another machine, so that its device is not checked here.

    Raises:
        ValueError: An unknown name or an invalid value.
    """
    import torch

    from nystrom.attention.backend import check_backend_device

    task, preset, attention = asked.task, asked.preset, asked.attention
    options, taps, changes = asked.options or {}, asked.conv_kernel_size, asked.changes()
    assert preset is not None, "what names no preset is settled by its caller"
    check_names("task", [task], LRA)
    base = find_preset(task, preset)
    if start is None:
        attention = attention or "nystrom"
        method = base.methods(base.data.max_length if positions is None else positions).get(attention, MethodSetting())
    else:
        named = {"attention": attention, "conv_kernel_size": taps}
        named |= {f"options.{name}": value for name, value in options.items()}
        start.check(base, named | {name: changes.get(name) for name in start.settings()})
        attention, method, positions = str(start.config.attention), start.method, start.positions(base, positions)
        base = start.within(base)
    fields_of = {argument: name for name, argument in ARGUMENTS.items()}
    chosen: dict[str, Any] = {fields_of.get(name, name): value for name, value in changes.items() if value is not None}
    if "adam_betas" in chosen:
        chosen["adam_betas"] = tuple(chosen["adam_betas"])
    steps = chosen.get("steps", base.steps)
    check_at_least("steps", steps, 1)
    given = _preset_values(base, method, chosen.get("position_kind"), steps, chosen.get("evaluate_every"))
    assert chosen.keys() <= given.keys()
    longest = attended(base, positions, (given | chosen)["pooling"])
    if start is not None:
        start.check_longest(longest)
    device = asked.device if elsewhere else usable_device(asked.device)
    settings = Settings(
        task=task,
        attention=attention,
        options=fit_options(attention, method.options, options, longest if start is None else None),
        conv_kernel_size=method.conv_kernel_size if taps is None else taps or None,
        preset=preset,
        seed=asked.seed,
        accumulation=asked.accumulation,
        processes=processes(),
        device=device,
        precision=usable_precision(asked.precision, device, has_bfloat16=True if elsewhere else None),
        positions=positions,
        compile=asked.compile,
        share_projections=method.share_projections,
        mask_share=asked.mask_share,
        model=None if start is None else str(start.folder),
        weights=None if start is None else start.weights,
        context_parallel=asked.context_parallel,
        **(given | chosen),
    )
    settings.encoder_config()
    check_backend_device(settings.options.get("backend", "auto"), torch.device(device))
    return settings


def _preset_values(
    base: Preset, method: MethodSetting, kind: str | None, steps: int, evaluate_every: int | None
) -> dict[str, Any]:
    """The defaults of a run of a method with this kind of positions (None for the preset's) and number of steps."""
    recipe = {name: getattr(base, name) for name in RECIPE} | {
        "position_kind": method.position_kind or base.position_kind
    }
    if (recipe["position_kind"] if kind is None else kind) != "rotary":
        recipe |= {"rotary_share": 1.0, "rotary_across_heads": False}
    every = min(base.evaluate_every, steps) if evaluate_every is None else evaluate_every
    return recipe | {
        "steps": steps,
        "batch_size": base.batch_size,
        "learning_rate": base.learning_rate,
        "warmup_steps": min(base.warmup_steps, int(base.warmup_steps * steps // base.steps)),
        "dropout": base.hidden_dropout_prob,
        "evaluate_every": every,
        "log_every": base.log_every if every % base.log_every == 0 else every,
    }


def differences(settings: RunSettings, before: Mapping[str, Any]) -> list[str]:
    """The differences from the settings of an earlier run, as "name is this here but was that"."""
    # As JSON has them: lists for tuples.
    now = json.loads(json.dumps(asdict(settings)))
    # A run that began before a setting existed had its default.
    defaults = {field.name: field.default for field in fields(settings) if field.default is not MISSING}
    before = {**json.loads(json.dumps(defaults)), **before}
    # Of earlier versions; it changed no weight.
    before.pop("track_error", None)
    return [
        f"{name} is {_shown(name, now)} but was {_shown(name, before)}"
        for name in sorted({*now, *before})
        if now.get(name) != before.get(name)
    ]


def _shown(name: str, settings: Mapping[str, Any]) -> str:
    """A setting in the user's terms: positions are not chosen but come from the preset or the data."""
    value = settings.get(name)
    if name != "positions":
        return repr(value)
    if value is not None:
        task = LRA.get(settings.get("task", ""))
        source = "the data's" if task is None or task.any_size else "--max-length"
        return f"{value} ({source})"
    preset = PRESETS.get((settings.get("task", ""), settings.get("preset", "")))
    return "the preset's" if preset is None else f"{preset.data.max_length} (the preset's)"
