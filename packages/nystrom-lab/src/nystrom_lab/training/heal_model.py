"""One healing, from a user's choices to the new model in its folder.

The module `healing` has what is learned, and `heal_trainer` how it is trained and reported.
"""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from nystrom.command_options import ConvertOptions
from nystrom.integrations.bert_names import FAMILIES, longest_input, positions_of
from nystrom.integrations.convert import convert
from nystrom.integrations.saving import save_with_attention
from nystrom.integrations.set_attention import check_attention, set_attention
from nystrom.json_files import read_json
from nystrom.models.files.folder import copy_sentence_modules, copy_tokenizer, fresh_folder
from nystrom.sums import SUMS, find_fault
from nystrom.temporary import naming, temporary_folder
from nystrom.whole_files import check_folder, check_fresh
from nystrom_lab.config import HealOptions
from nystrom_lab.data.language.encoder_texts import load_encoder
from nystrom_lab.data.language.tokenizer import load_tokenizer
from nystrom_lab.training.finetune.encoding import collator, padding_of
from nystrom_lab.training.hardware import is_main
from nystrom_lab.training.heal_settings import HealSettings, planned
from nystrom_lab.training.heal_texts import digest_of, read_samples
from nystrom_lab.training.heal_trainer import HEALED, HealTrainer, stopped_after
from nystrom_lab.training.healing import Healing, two_tokens
from nystrom_lab.training.life import Data, Kind, execute, leaving_the_group
from nystrom_lab.training.run_folder import RunFolder, written
from nystrom_lab.training.run_trainer import RunTrainer
from nystrom_lab.training.start import OWN_TYPES, StartModel, find_start


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
        self.train, self.held_out = read_samples(settings, self.tokenizer)
        folder = ", ".join(str(path.resolve()) for path in self.options.texts)
        return Data(folder, digest_of(self.train, self.held_out))

    def model(self, settings: HealSettings) -> Healing:
        """Make the module of both models, which must differ."""
        healing = Healing(self.student, self.made, settings.learn, mask=_mask_token(self.tokenizer))
        self.collate = collator(padding_of(self.tokenizer))
        healing.check_differs(self.collate([self.held_out[int(self.held_out.lengths.argmax())]]))
        return healing

    def trainer(self, model: Healing, settings: HealSettings) -> RunTrainer[HealSettings]:
        """Make the trainer, of fewer steps where an interrupted run had stopped learning."""
        stopped = stopped_after(self.run, settings.before_last_stage) if self.run.is_started else None
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
