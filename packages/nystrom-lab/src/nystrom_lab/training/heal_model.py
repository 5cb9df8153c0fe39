"""One healing, from a user's choices to the new model in its folder; what is learned is in `healing`."""

import hashlib
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import EvalPrediction, TrainerCallback

from nystrom.attention.method_names import sized_name
from nystrom.command_options import ConvertOptions
from nystrom.integrations.bert_names import FAMILIES, longest_input, positions_of
from nystrom.integrations.convert import convert
from nystrom.integrations.saving import save_with_attention
from nystrom.integrations.set_attention import check_attention, set_attention
from nystrom.json_files import read_json
from nystrom.models.files.folder import (
    copy_sentence_modules,
    copy_tokenizer,
    fresh_folder,
    write_card,
)
from nystrom.sums import CARD, SUMS, find_fault
from nystrom.temporary import naming, temporary_folder
from nystrom.whole_files import check_folder, check_fresh, write_whole
from nystrom_lab.config import HealOptions, Optimizer
from nystrom_lab.data.language.encoder_texts import load_encoder
from nystrom_lab.data.language.labelled.splits import TextSplit
from nystrom_lab.data.language.tokenizer import load_tokenizer
from nystrom_lab.measure.rows import Row, cpu_name
from nystrom_lab.report.plots.curves import draw_over_minutes
from nystrom_lab.training.finetune.encoding import EncodedSplit, collator, padding_of
from nystrom_lab.training.finetune.finetune_settings import ADAM_EPSILON, model_name
from nystrom_lab.training.hardware import is_main
from nystrom_lab.training.heal_settings import HealSettings, planned
from nystrom_lab.training.heal_texts import read_texts
from nystrom_lab.training.healing import Healing, two_tokens
from nystrom_lab.training.life import Data, Kind, execute, leaving_the_group
from nystrom_lab.training.run_folder import RunFolder, state_of, written
from nystrom_lab.training.run_trainer import RunResults, RunTrainer, training_arguments
from nystrom_lab.training.start import OWN_TYPES, StartModel, find_start

OPTIMIZER = Optimizer(schedule="linear", clip_norm=1.0, adam_betas=(0.9, 0.999), weight_decay=0.0)
# In the configuration of a healed model: the name of the model that it learned from.
HEALED = "healed_from"
# Measurements without a new best, after which a run stops.
_PATIENCE = 3
_AT_ONCE = 64


@leaving_the_group
def heal_model(options: HealOptions, run: RunFolder, words: Sequence[str], *, resume: bool) -> None:
    """Convert a model and heal it; see `nystrom_lab.training.heal.heal`.

    Args:
        options: The user's options.
        run: The folder of the run.
        words: The command, after `nystrom`.
        resume: Continue the run in the folder.
    """
    execute(HealRun(options, run, words), resume=resume)


class HealRun(Kind[HealOptions, HealSettings]):
    """A healing: the run whose best model is copied to the folder of the new model.

    Args:
        options: The user's options.
        run: The folder of the run.
        words: The command, after `nystrom`.
    """

    def __init__(self, options: HealOptions, run: RunFolder, words: Sequence[str]):
        super().__init__(options, run)
        self._words = words

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Convert the source into a folder that is removed at the end."""
        self.start = find_start(self.options.source)
        _check_source(self.start)
        with _converted(self.options) as (self.made, self.method, self.method_options):
            yield

    def settings(self) -> HealSettings:
        """Resolve the settings for the converted model."""
        self.student = load_encoder(self.made, decoders=True)
        return HealSettings.resolve(
            self.options,
            attention=self.method,
            of_method=self.method_options,
            longest=positions_of(self.student.config) or longest_input(self.student.config),
            fingerprint=self.start.fingerprint,
        )

    def data(self, settings: HealSettings) -> Data:
        """Read and encode the texts, if the folder of the new model is free."""
        if not self.run.is_started or not self.run.is_finished:
            check_fresh(self.options.to)
        self.tokenizer = load_tokenizer(self.made)
        self.train, self.held_out = _samples(settings, self.tokenizer)
        folder = ", ".join(str(path.resolve()) for path in self.options.texts)
        return Data(folder, _digest(self.train, self.held_out))

    def model(self, settings: HealSettings) -> Healing:
        """Make the module of both models, which must differ."""
        healing = Healing(self.student, self.made, settings.learn, mask=_mask_token(self.tokenizer))
        self.collate = collator(padding_of(self.tokenizer))
        healing.check_differs(self.collate([self.held_out[int(self.held_out.lengths.argmax())]]))
        return healing

    def trainer(self, model: Healing, settings: HealSettings) -> RunTrainer[HealSettings]:
        """Make the trainer, of fewer steps where an interrupted run had stopped learning."""
        stopped = _stopped_after(self.run, settings.before_last_stage) if self.run.is_started else None
        if stopped is not None:
            # The stage's last checkpoint is written, and its results are not.
            settings = replace(settings, steps=stopped, warmup_steps=0)
        return HealTrainer(model, settings, self.made, self.train, self.held_out, self.collate, self.run)

    def words(self, settings: HealSettings) -> Sequence[str]:
        """The command as it was given."""
        return self._words

    def close(self) -> None:
        """Copy the best model to its folder, unless it is there."""
        if is_main() and find_fault(self.options.to, of=self.run.best):
            _copy_best(self.run, self.options.to)
            print(f"healed {self.options.to}", flush=True)


def _copy_best(run: RunFolder, to: Path) -> None:
    """Write the healed model into its folder, which may have been taken while the model was healed.

    Raises:
        ValueError: The folder holds something else.
        NotWritten: It cannot be written.
    """
    try:
        with written(to, "continue with --resume"), fresh_folder(to) as partial:
            shutil.copytree(run.best, partial, dirs_exist_ok=True, ignore=shutil.ignore_patterns(SUMS))
    except ValueError as error:
        raise ValueError(
            f"{error} The healed model is {run.best}; once {to} is free, --resume copies it there."
        ) from error


def _check_source(start: StartModel) -> None:
    """Raise ValueError for a model that cannot learn, or would learn from another than it did."""
    if getattr(start.config, "quantization_config", None):
        raise ValueError(
            f"model {start.folder} is quantised (quantization_config in its config.json), and its weights cannot "
            "learn: heal the model before quantisation, and quantise the result."
        )
    if (teacher := getattr(start.config, HEALED, None)) is not None:
        raise ValueError(
            f"model {start.folder} is healed already, from {teacher}: its exact self is not what it learned from. Heal "
            f"{teacher} with more steps instead."
        )


@contextmanager
def _converted(options: HealOptions) -> Iterator[tuple[Path, str, dict[str, Any]]]:
    """The source in a folder that is removed at the end, converted, and its method and options."""
    check_folder(options.to.parent)
    with temporary_folder(options.to) as around:
        made = around / "converted"
        method, method_options = _convert(options, made)
        with naming(options.source, made):
            yield made, method, method_options


def _convert(options: HealOptions, to: Path) -> tuple[str, dict[str, Any]]:
    """Convert the source to a folder; its method and options.

    Raises:
        ValueError: It cannot be converted.
    """
    if read_json(options.source / "config.json").get("model_type") in (*FAMILIES, *OWN_TYPES):
        named: dict[str, Any] = {entry.name: getattr(options, entry.name) for entry in fields(ConvertOptions)}
        named["to"] = to
        made = convert(ConvertOptions(**named))
        if is_main():
            print(str(made).replace(str(to), str(options.to)), flush=True)
        config = read_json(to / "config.json")
        if "attention" not in config:
            # The published format, whose number of landmarks is its method.
            return "nystrom", {"num_landmarks": config["num_landmarks"]}
        return config["attention"], config["attention_options"]
    for name in ("max_position_embeddings", "conv_kernel_size"):
        if (value := getattr(options, name)) not in (None, "auto"):
            raise ValueError(
                f"{name} is {value}, but of {options.source}, which is no BERT or RoBERTa, the attention alone is "
                "replaced: leave it out."
            )
    model = load_encoder(options.source, decoders=True)
    method, method_options = planned(options)
    method = method or "nystrom"
    set_attention(model, method, method_options)
    check_attention(model, two_tokens(model))
    save_with_attention(model, to)
    length = longest_input(model.config) or load_tokenizer(options.source).model_max_length
    copy_tokenizer(options.source, to, max_length=length)
    copy_sentence_modules(options.source, to, max_length=length)
    return method, method_options


def _mask_token(tokenizer: Any) -> int | None:
    return tokenizer.mask_token_id


class Samples:
    """Texts as tokens.

    Args:
        rows: The tokens of each.

    Attributes:
        lengths: Tokens of each.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]]):
        self.rows = rows
        self.lengths = np.array([len(row["input_ids"]) for row in rows], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int, /) -> Mapping[str, Any]:
        return self.rows[index]


def _samples(settings: HealSettings, tokenizer: Any) -> tuple[Samples, Samples]:
    """The texts to learn from, as many as the run can read, and those that are held out.

    Raises:
        ValueError: There are too few that are long enough.
    """
    rows: list[Mapping[str, Any]] = []
    read, longest = 0, 0
    wanted, least = settings.steps * settings.batch_size + settings.held_out, settings.batch_size + settings.held_out
    texts = read_texts(settings, length=settings.length)
    while len(rows) < wanted and (part := list(islice(texts, _AT_ONCE))):
        encoded = EncodedSplit(TextSplit(part, None, None), tokenizer, max_length=settings.length, segments=False)
        rows += [encoded[i] for i in range(len(part)) if encoded.lengths[i] >= settings.shortest]
        read, longest = read + len(part), max(longest, int(encoded.lengths.max()))
    if len(rows) < least:
        raise ValueError(
            f"{len(rows)} of {read} texts have at least {settings.shortest} tokens, the longest {longest}; expected "
            f"{least}, {settings.held_out} of them held out: name more or longer texts (in a plain text file a blank "
            "line ends one), or take --shortest or --length smaller."
        )
    rows = rows[:wanted]
    order = np.random.default_rng(0).permutation(len(rows)).tolist()
    parts = order[settings.held_out :], order[: settings.held_out]
    train, held_out = (Samples([rows[i] for i in sorted(part)]) for part in parts)
    return train, held_out


def _digest(*splits: Samples) -> str:
    digest = hashlib.sha256()
    for split in splits:
        digest.update(split.lengths.tobytes())
        for row in split.rows:
            digest.update(row["input_ids"].tobytes())
    return digest.hexdigest()[:16]


class HealTrainer(RunTrainer[HealSettings]):
    """The trainer of healings; the error of the held-out texts selects the best checkpoint.

    Args:
        healing: The models.
        settings: Settings of the run.
        made: Folder of the conversion.
        train: The texts to learn from.
        held_out: The others.
        collate: Makes a batch.
        run: The folder.
    """

    def __init__(
        self,
        healing: Healing,
        settings: HealSettings,
        made: Path,
        train: Samples,
        held_out: Samples,
        collate: Callable[..., dict[str, Tensor]],
        run: RunFolder,
    ):
        self.healing, self.made = healing, made
        arguments = training_arguments(settings, OPTIMIZER, run, adam_epsilon=ADAM_EPSILON)
        arguments.eval_on_start = not run.is_started or run.last_step() is None
        super().__init__(
            healing,  # pyright: ignore[reportArgumentType] (a module with the models in it)
            arguments,
            settings=settings,
            train=train,
            validation=held_out,
            collate=collate,
            run=run,
            quantities={
                "loss": "train loss",
                "eval_error": "held-out error",
                "eval_distance": healing.distance,
                "learning_rate": "learning rate",
            },
            compute_metrics=_scored,
        )
        self.add_callback(_Stop(settings))

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *_: Any, **__: Any) -> Any:
        """The loss of the stage."""
        return model(**inputs, whole=self.state.global_step >= self.settings.layer_steps)["loss"]

    def prediction_step(self, model: nn.Module, inputs: dict[str, Any], *_: Any, **__: Any) -> Any:
        """The errors of a batch of held-out texts."""
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            errors = self.healing.errors(inputs["input_ids"], inputs["attention_mask"])
        errors = torch.stack(errors, dim=1).float()
        return errors[:, 0].mean(), errors, errors[:, 0]

    def score_best(self, step: int) -> tuple[Any, Any]:
        """The model after the best step, and its errors before and after."""
        self.healing.load_state_dict(load_file(self.run.checkpoint(step) / "model.safetensors"))
        return self.healing.healed(), self.reached()

    def reached(self) -> "Healed":
        """The errors before, and after the best step."""
        before, after = (
            Score(logged["eval_error"], logged["eval_distance"])
            for logged in (self.logged_at(0), self.logged_at(self.state.best_global_step or 0))
        )
        return Healed(before, after, self.seconds, self.state.global_step)

    def save_best(self, model: Any, folder: Path) -> None:
        """Save the healed model, or the conversion as it came where that is nearer to the exact model."""
        shutil.copytree(self.made, folder, dirs_exist_ok=True)
        healed = self.reached()
        if healed.is_better:
            setattr(model.config, HEALED, model_name(str(self.settings.source)))
            save_with_attention(model, folder)
        write_card(folder)
        card = folder / CARD
        text = card.read_text(encoding="utf-8") if card.is_file() else ""
        write_whole(card, f"{text}\n{self._told(healed)}")

    def _told(self, healed: "Healed") -> str:
        """The healing's part of the model card."""
        settings, texts = self.settings, ", ".join(path.name for path in self.settings.texts)
        return (
            "## Healed\n\n"
            f"Its attention ({sized_name(settings.attention, settings.options)[0]}) learned from the exact model, "
            f"{model_name(str(settings.source))}, on up to {len(self.train_samples)} texts of {settings.shortest} to "
            f"{settings.length} tokens ({texts}), in {healed.steps} steps of {settings.batch_size} and "
            f"{healed.seconds / 60:.1f} minutes. What learned: {settings.learn}.\n\n"
            f"{healed.told(self.healing.distance)}, on {len(self.validation)} held-out texts.\n"
        )

    def results(self, model: Any, scores: Any, command: str) -> RunResults:
        """The errors before and after."""
        settings, config = self.settings, self.healing.student.config
        name, size = sized_name(settings.attention, settings.options)

        def row(quantity: str, value: float, unit: str = "", **more: Any) -> Row:
            return Row(
                study="heal",
                quantity=quantity,
                method=name,
                value=value,
                unit=unit,
                n=settings.length,
                m=size,
                facts={
                    "model": model_name(str(settings.source)),
                    "fingerprint": settings.fingerprint,
                    "layers": getattr(config, "num_hidden_layers", None),
                    "width": getattr(config, "hidden_size", None),
                    "heads": getattr(config, "num_attention_heads", None),
                    "batch_size": settings.batch_size,
                    "learning_rate": settings.learning_rate,
                    "learn": settings.learn,
                    "whole": settings.whole,
                },
                dtype=settings.precision,
                seed=settings.seed,
                device=torch.cuda.get_device_name() if settings.device == "cuda" else cpu_name(),
                command=command,
                **more,
            )

        texts = len(self.validation)
        rows = [
            row(f"{what} {when}", value, repeats=texts)
            for when, score in (("before", scores.before), ("after", scores.after))
            for what, value in (("held-out error", score.error), (self.healing.distance, score.distance))
        ]
        said = scores.told(self.healing.distance)
        if not scores.is_better:
            said += "; the healed model is not nearer to the exact one, so the conversion is kept as it came"
        figure = self.run.path / "error.png"
        draw_over_minutes(self.run.curves, figure, "held-out error")
        files = {**self.run.drawn, "error": figure}
        # On a busy machine minutes say little. After an interruption this is the time of the last process alone.
        rows.append(row("processor time", time.process_time(), "s"))
        return RunResults(rows, row, f"{said} (best after step {self.state.best_global_step})", files)


class Score(NamedTuple):
    """The mean errors over the held-out texts; see `Errors`."""

    error: float
    distance: float


class Healed(NamedTuple):
    """The results of a healing.

    Attributes:
        before: Score of the conversion.
        after: Score of the best checkpoint.
        seconds: Seconds of training, with the measurements.
        steps: How many steps there were.
    """

    before: Score
    after: Score
    seconds: float
    steps: int

    @property
    def is_better(self) -> bool:
        """Whether both errors are smaller than before."""
        return self.after.error < self.before.error and self.after.distance <= self.before.distance

    def told(self, distance: str) -> str:
        """The errors in words."""
        kept = "" if self.is_better else ", not kept"
        return (
            f"Error of the last hidden states {self.before.error:.3g} before, {self.after.error:.3g} after; {distance} "
            f"{self.before.distance:.3g} before, {self.after.distance:.3g} after{kept}"
        )


class _Stop(TrainerCallback):
    """Ends a run whose held-out error has stopped falling.

    Args:
        settings: Settings of the run.
    """

    def __init__(self, settings: HealSettings):
        self.settings = settings

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop after measurements of the last stage without a new best."""
        if _has_stopped(state.log_history, self.settings.before_last_stage):
            control.should_training_stop = True


def _has_stopped(logged: Sequence[Mapping[str, float]], before: int) -> bool:
    """Whether the last measurements, all of the last stage, brought no new best."""
    errors = [(entry["step"], entry["eval_error"]) for entry in logged if "eval_error" in entry]
    last, earlier = errors[-_PATIENCE:], errors[:-_PATIENCE]
    if not earlier or any(step <= before for step, _ in last):
        return False
    return min(error for _, error in last) >= min(error for _, error in earlier)


def _stopped_after(run: RunFolder, before: int) -> int | None:
    """The step after which a run had stopped; None if it goes on."""
    step = run.last_step()
    logged = [] if step is None else state_of(run.checkpoint(step)).get("log_history", [])
    return step if _has_stopped(logged, before) else None


def _scored(prediction: EvalPrediction) -> dict[str, float]:
    errors: NDArray[Any] = np.asarray(prediction.predictions)
    error, distance = errors.mean(axis=0).tolist()
    return {"error": error, "distance": distance, "selection": -error}
