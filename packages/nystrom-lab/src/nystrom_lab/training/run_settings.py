"""The settings of one run: a preset, its changes, its length and where it runs; checked before anything is created.

A model has the preset's positions, one per pixel of larger images, or as many as requested. All samples of an image
data set have the same size. If the task allows several sizes (`TaskFacts.any_size`) and they are larger than the
preset's, the model has a position for each of their pixels, and the option of a method that sets its longest sequence
follows. Longer samples of other tasks raise an error when they are opened.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, get_args

from nystrom.attention.method_names import DROPS_WEIGHTS
from nystrom.checks import check_at_least, check_choice, check_flag, check_names
from nystrom_lab.config import FLAGS, Arena, LearningRateSchedule, Loop, Resolved, TrainOptions, option_words
from nystrom_lab.data.lra.facts import LRA
from nystrom_lab.training.fitted_options import attended, fit_options
from nystrom_lab.training.hardware import processes, usable_device, usable_precision
from nystrom_lab.training.presets import PLAIN, MethodSetting, Preset, find_preset

if TYPE_CHECKING:
    from nystrom.models import EncoderConfig
    from nystrom_lab.training.start import StartEncoder


def data_positions(preset: Preset, data: Path | None) -> int | None:
    """The positions that a model needs for larger data than its preset's; None for the preset's.

    Args:
        data: A prepared folder; None for the preset's. A missing folder counts as the preset's.

    Raises:
        ValueError: The folder holds no data of the task.
    """
    from nystrom_lab.training.tasks import default_folder, find_task

    folder = default_folder(preset.data) if data is None else data
    if not LRA[preset.task].any_size or not folder.is_dir():
        return None
    longest = int(find_task(preset.task).open(folder, "train").lengths.max(initial=0))
    return longest if longest > preset.data.max_length else None


def lengthened(preset: Preset, max_length: int) -> Preset:
    """The preset for sequences of another length, with its own data folder.

    Raises:
        ValueError: The task has images, or the length is too short for any sequence.
    """
    facts, data = LRA[preset.task], preset.data
    if facts.pad_token_id is None:
        raise ValueError(
            f"max_length is {max_length}, but {preset.task} has images: leave it out, and name data of another size "
            "with --data, which the model follows."
        )
    check_at_least("max_length", max_length, data.min_length + 2)
    return replace(preset, data=replace(data, folder=f"{preset.task}-{max_length}", max_length=max_length))


@dataclass(frozen=True)
class Settings(Resolved, TrainOptions):
    """Everything that determines the result of a run, except the data.

    `max_length` is None for the positions of the preset.

    Attributes:
        share_projections: Whether all layers share the weights of the method.
    """

    share_projections: bool = field(default=False, kw_only=True)
    in_file: ClassVar[Mapping[str, str]] = MappingProxyType({**Resolved.in_file, "max_length": "positions"})
    at_first: ClassVar[dict[str, Any]] = {entry.name: getattr(PLAIN, entry.name) for entry in fields(Arena)}

    def __post_init__(self):
        super().__post_init__()
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
        for name, none in (("label_smoothing", "for none"), ("mask_share", "to learn the class")):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected a number in [0, 1), 0 {none}.")
        if len(self.adam_betas) != 2 or not all(0 <= beta < 1 for beta in self.adam_betas):
            raise ValueError(f"adam_betas is {self.adam_betas!r}; expected two numbers in [0, 1).")
        # Masked inputs are learned without a head.
        if self.pooled_norm != "none" and self.part_size == 1 and self.mask_share == 0:
            raise ValueError(
                f"pooled_norm is {self.pooled_norm!r}, but a process computes one sample at a time, which has no "
                "variance: use a larger batch_size or a smaller accumulation, or pooled_norm 'none'."
            )

    @classmethod
    def resolve(
        cls,
        options: TrainOptions,
        *,
        num_positions: int | None = None,
        start: "StartEncoder | None" = None,
        elsewhere: bool = False,
    ) -> "Settings":
        """The settings of a run: its options, fitted to the length of its sequences and to the machine.

        Args:
            options: The options, see `train_options`.
            num_positions: Number of positions of the model, see the module's docstring; None for the preset's.
            start: The encoder that the run starts from; None for none.
            elsewhere: Whether the run is for another machine, so that its device is not checked here.

        Raises:
            ValueError: An unknown name or an invalid value.
        """
        import torch

        from nystrom.attention.backend import check_backend_device

        base, attention, taps = find_preset(options.task, options.preset), options.attention, options.conv_kernel_size
        if start is None:
            length = base.data.max_length if num_positions is None else num_positions
            method = base.methods(length).get(attention, MethodSetting())
        else:
            method, num_positions = start.method, start.num_positions(base, num_positions)
        longest = attended(base, num_positions, options.pooling)
        if start is not None:
            start.check_longest(longest)
        device = options.device if elsewhere else usable_device(options.device)
        fitted: dict[str, Any] = {
            "options": fit_options(attention, method.options, options.options, longest if start is None else None),
            "conv_kernel_size": method.conv_kernel_size if taps is None else taps or None,
            "adam_betas": tuple(options.adam_betas),
            "device": device,
            "precision": usable_precision(options.precision, device, has_bfloat16=True if elsewhere else None),
            "max_length": num_positions,
            "model": None if start is None else Path(start.folder),
        }
        settings = cls(
            **(vars(options) | fitted),
            processes=processes(),
            fingerprint=None if start is None else start.fingerprint,
            share_projections=method.share_projections,
        )
        settings.encoder_config()
        check_backend_device(settings.options.get("backend", "auto"), torch.device(device))
        return settings

    @property
    def base(self) -> Preset:
        """The preset."""
        return find_preset(self.task, self.preset)

    @property
    def longest(self) -> int:
        """The longest sequence of the model: its positions."""
        return self.base.data.max_length if self.max_length is None else self.max_length

    def changes(self) -> dict[str, object]:
        """The user's changes to the preset: options of the method as "options.NAME", other settings by name."""
        base = self.base
        method = base.methods(self.longest).get(self.attention, MethodSetting())
        before = fit_options(self.attention, method.options, {}, attended(base, self.max_length, self.pooling))
        changed = {f"options.{name}": value for name, value in self.options.items() if value != before.get(name)}
        if self.conv_kernel_size != method.conv_kernel_size:
            changed["conv_kernel_size"] = self.conv_kernel_size or 0
        plain = preset_values(base, method, self.position_kind, self.steps, self.evaluate_every)
        plain |= {"position_kind": method.position_kind or base.position_kind, "steps": base.steps}
        plain["evaluate_every"] = min(base.evaluate_every, self.steps)
        plain = {name: now for name, value in plain.items() if (now := getattr(self, name)) != value}
        return changed | {FLAGS.get(name, name): now for name, now in plain.items()}

    def words(self) -> list[str]:
        """The words after `nystrom` that start this run by itself."""
        named: dict[str, object] = {"attention": self.attention, "preset": self.preset, "seed": self.seed}
        # An option that the preset sets has its value written out, be it True or, for a method's option, None.
        for name, value in self.changes().items():
            if value is not None or name.startswith("options."):
                named[name] = value if isinstance(value, tuple) else str(value)
        named |= {name: value for name in ("accumulation", "context_parallel") if (value := getattr(self, name)) != 1}
        # An option that was not passed is None, False or 0.
        others = ("precision", "device", "threads", "compile", "data", "text_field", "label_field", "pair_field", "to")
        named |= {name: getattr(self, name) or None for name in (*others, "model", "mask_share")}
        if not LRA[self.task].any_size:
            named["max_length"] = self.max_length
        return ["pretrain" if self.mask_share else "train", self.task, *option_words(named)]

    def shown(self, name: str, value: Any) -> str:
        """A recorded setting in the user's terms: positions are not chosen but come from the preset or the data."""
        if name != "positions":
            return repr(value)
        if value is None:
            return f"{self.base.data.max_length} (the preset's)"
        source = "the data's" if LRA[self.task].any_size else "--max-length"
        return f"{value} ({source})"

    def encoder_config(self, classes: Sequence[str] | None = None) -> "EncoderConfig":
        """The model.

        Args:
            classes: Labels of the classes of the data; None for the task's numbers.

        Raises:
            ValueError: An unknown method or option, or a value that the model does not support.
        """
        from nystrom.models import EncoderConfig

        facts, preset = LRA[self.task], self.base
        drops_weights = self.drop_weights and self.attention in DROPS_WEIGHTS
        names = [str(label) for label in range(facts.num_labels)] if classes is None else classes
        of_preset = (
            "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act",
            "initializer_range", "norm", "attention_size",
        )  # fmt: skip
        of_run = (
            "pooling", "pooled_norm", "rotary_share", "rotary_across_heads", "feed_forward", "design",
            "attention", "conv_kernel_size", "task",
        )  # fmt: skip
        return EncoderConfig(
            vocab_size=facts.vocab_size,
            id2label=dict(enumerate(names)),
            label2id={name: label for label, name in enumerate(names)},
            pad_token_id=facts.pad_token_id,
            max_position_embeddings=self.longest,
            positions=self.position_kind,
            type_vocab_size=1,
            hidden_dropout_prob=self.dropout,
            attention_probs_dropout_prob=self.dropout if drops_weights else 0.0,
            short_conv_kernel_size=self.short_conv_kernel_size or None,
            attention_options=dict(self.options),
            share_attention_weights=self.share_projections,
            **{name: getattr(preset, name) for name in of_preset},
            **{name: getattr(self, name) for name in of_run},
        )


def train_options(
    task: str,
    *,
    preset: str | None = None,
    model: Path | None = None,
    attention: str | None = None,
    options: Mapping[str, object] | None = None,
    **changes: Any,
) -> TrainOptions:
    """The options of a run: those of a preset, or of the encoder that the run starts from, and changes to them.

    Options that were not passed follow the changes on which they depend: warm-up and intervals the steps, and the share
    of the width that is rotated the kind of positions.

    Args:
        preset: Default: that of the model's run, or nystromformer.
        attention: Default: that of the model, or nystrom.
        options: Options of the method, in place of the preset's. Default: those of the preset or the model.
        **changes: Other fields of `TrainOptions`.

    Raises:
        ValueError: An unknown name, or a change that contradicts the encoder.
    """
    check_names("task", [task], LRA)
    start = None
    if model is not None:
        from nystrom_lab.training.start import find_encoder

        start = find_encoder(Path(model))
    if changes.get("mask_share"):
        for about in ("pooling", "pooled_norm", "label_smoothing", "denoise"):
            if value := changes.get(about):
                raise ValueError(f"{about} is {value!r}, but masked tokens have no class: leave it out.")
    preset = preset or (start and start.preset) or "nystromformer"
    base = find_preset(task, preset)
    if start is None:
        attention = attention or "nystrom"
        method = base.methods(base.data.max_length).get(attention, MethodSetting())
    else:
        given = {f"options.{name}": value for name, value in (options or {}).items()}
        given |= {name: changes.get(name) for name in ("conv_kernel_size", *start.settings())}
        start.check(base, {"attention": attention, **given})
        base, attention, method = replace(base, **start.settings()), str(start.config.attention), start.method
    steps = changes.get("steps", base.steps)
    check_at_least("steps", steps, 1)
    values = preset_values(base, method, changes.get("position_kind"), steps, changes.get("evaluate_every")) | changes
    return TrainOptions(task, preset=preset, model=model, attention=attention, options=options or {}, **values)


def preset_values(
    base: Preset, method: MethodSetting, position_kind: str | None, steps: int, evaluate_every: int | None
) -> dict[str, Any]:
    """The defaults of a run of a method, by the names of `Arena`.

    Args:
        position_kind: The requested kind; None for the preset's.
        evaluate_every: The requested interval; None for the preset's.
    """
    values = {entry.name: getattr(base, entry.name) for entry in fields(Arena)}
    values["position_kind"] = method.position_kind or base.position_kind
    if (position_kind or values["position_kind"]) != "rotary":
        values |= {"rotary_share": 1.0, "rotary_across_heads": False}
    return values | in_proportion(base, steps, base.steps, evaluate_every)


def in_proportion(base: Loop, steps: int, whole: int, evaluate_every: int | None) -> dict[str, Any]:
    """The warm-up and intervals of a run of another number of steps.

    The warm-up keeps its proportion, and the run is evaluated at least at its end. A shorter interval of evaluation
    shortens the interval of the curve.

    Args:
        whole: Steps that the preset's warm-up is meant for.
        evaluate_every: The requested interval; None for the preset's.
    """
    every = min(base.evaluate_every, steps) if evaluate_every is None else evaluate_every
    return {
        "steps": steps,
        "warmup_steps": min(base.warmup_steps, int(base.warmup_steps * steps // whole)),
        "evaluate_every": every,
        "log_every": base.log_every if every % base.log_every == 0 else every,
    }
