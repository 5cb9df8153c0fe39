"""One training run, from its checked settings to its results."""

import importlib.util
from pathlib import Path

import torch
from transformers import set_seed

from nystrom.models import EncoderConfig, EncoderModel
from nystrom_lab.training.additions.compiling import check_compiler
from nystrom_lab.training.command import command_line, train_words
from nystrom_lab.training.data.columns import Columns
from nystrom_lab.training.data.tasks import (
    Model,
    class_names,
    default_folder,
    find_task,
    fingerprint,
    open_splits,
    prepare_if_missing,
    prepared_folder,
)
from nystrom_lab.training.hardware import is_main
from nystrom_lab.training.presets.published import Preset
from nystrom_lab.training.ranks.lost import leaving_the_group, naming_lost_ranks
from nystrom_lab.training.ranks.pieces import check_pieces
from nystrom_lab.training.run.arguments import AdamValues, training_arguments
from nystrom_lab.training.run.finished import is_done
from nystrom_lab.training.run.folder import RunFolder
from nystrom_lab.training.run.masked_trainer import MaskedTrainer
from nystrom_lab.training.run.outputs import finish, finish_masked, score_best
from nystrom_lab.training.run.progress import no_file_bars, no_load_report
from nystrom_lab.training.run.to_the_end import train_to_the_end
from nystrom_lab.training.run.trainer import EncoderTrainer
from nystrom_lab.training.run_settings import Settings
from nystrom_lab.training.versions import versions


@leaving_the_group
def train_model(
    settings: Settings,
    preset: Preset,
    data: Path | None,
    run: RunFolder,
    *,
    columns: Columns,
    resume: bool,
    threads: int | None,
    timeout: int,
) -> None:
    """Train with checked settings, and write the results.

    Args:
        settings: Settings of the run.
        preset: The preset that they come from.
        data: The data as given by the user; None for the preset's.
        run: The folder, which this process has locked.
        columns: Columns of texts and labels in the user's own files.
        resume: Continue from the last complete checkpoint.
        threads: CPU threads; None for torch's choice.
        timeout: Seconds to wait for the other processes.

    Raises:
        ValueError: Data that cannot be trained on, or a missing compiler.
        FloatingPointError: The loss or a weight is no longer finite.
        OSError: A file could not be written; the message names the folder and how to continue.
    """
    check_pieces(
        settings.context_parallel,
        lambda: _new_model(settings, settings.encoder_config()),
        compile=settings.compile,
    )
    if threads is not None:
        torch.set_num_threads(threads)
    reports = ["tensorboard"] if importlib.util.find_spec("tensorboard") else []
    values = AdamValues(settings.adam_betas, preset.adam_epsilon, settings.weight_decay)
    arguments = training_arguments(
        settings,
        values,
        run,
        reports=reports,
        schedule=settings.schedule,
        clip_norm=settings.clip_norm,
        timeout=timeout,
    )
    if settings.compile and settings.denoise:
        raise ValueError(
            "compile is on, but denoise collects the states of all layers, which a compiled graph does not: leave one "
            "out."
        )
    if settings.compile:
        check_compiler(settings.device)
    with arguments.main_process_first(local=False):
        if data is None:
            folder = default_folder(preset.data)
            prepare_if_missing(settings.task, folder, preset.data)
        else:
            folder = prepared_folder(settings.task, data, max_length=settings.max_length, columns=columns)
    splits = open_splits(
        settings.task,
        folder,
        positions=settings.max_length,
        batch_size=settings.batch_size,
        test=not settings.mask_share,
    )
    digest = fingerprint(splits, folder)
    run.check_data(digest)
    if is_done(run, resume=resume):
        return
    if is_main():
        run.start(
            settings,
            data={"folder": str(folder.resolve()), "fingerprint": digest},
            versions=versions(),
        )
    set_seed(settings.seed)
    with no_file_bars():
        model = start_model(settings, settings.encoder_config(class_names(splits.train)))
        parts = {"settings": settings, "preset": preset, "splits": splits, "run": run}
        if isinstance(model, EncoderModel):
            trainer = MaskedTrainer(model, arguments, **parts)
        else:
            trainer = EncoderTrainer(model, arguments, **parts)
        train_to_the_end(trainer, resume=resume)
        with naming_lost_ranks(lambda: "while it scored", trainer.remedy):
            if is_main():
                words = train_words(
                    settings, data=folder if data is None else data, columns=columns, to=run.path, threads=threads
                )
                command = command_line(words, settings.processes)
                if isinstance(trainer, MaskedTrainer):
                    finish_masked(trainer, settings, run, command=command)
                else:
                    finish(trainer, settings, run, command=command)
            elif trainer.pieces is not None and trainer.pieces.with_main and not settings.mask_share:
                score_best(trainer, settings, run)


def start_model(settings: Settings, config: EncoderConfig) -> Model | EncoderModel:
    """The model of a run: an encoder alone for masked tokens, or with a new head for classes.

    Args:
        settings: Settings of the run; if they name an encoder, its weights are used.
        config: Configuration of the model.

    Raises:
        ValueError: Weights that do not match; the message names them.
    """
    if settings.model is None:
        return _new_model(settings, config)
    with no_load_report():
        encoder = EncoderModel.from_pretrained(settings.model, config=config)
    if settings.mask_share:
        return encoder
    model = find_task(settings.task).model(config)
    model.nystromformer.load_state_dict(encoder.state_dict())
    return model


def _new_model(settings: Settings, config: EncoderConfig) -> Model | EncoderModel:
    return EncoderModel(config) if settings.mask_share else find_task(settings.task).model(config)
