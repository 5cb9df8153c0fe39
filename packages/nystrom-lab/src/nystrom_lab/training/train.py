"""Train a model on a task, from the options to the results.

Everything that determines the result is resolved and checked before data or model are created. On the same machine and
with the same number of processes, a run that was killed and resumed ends with the weights and the curves of one that
was not; up to rounding with more than two processes, which add gradients in an order that is not fixed.
"""

from dataclasses import replace
from pathlib import Path

import torch
from transformers import set_seed

from nystrom.models import EncoderConfig, EncoderModel
from nystrom_lab.config import TrainOptions, command_line
from nystrom_lab.training.arena import EncoderTrainer
from nystrom_lab.training.hardware import is_main
from nystrom_lab.training.presets import Preset, find_preset
from nystrom_lab.training.run_folder import RunFolder
from nystrom_lab.training.run_progress import no_file_bars
from nystrom_lab.training.run_settings import Settings, data_positions, lengthened, settle
from nystrom_lab.training.run_trainer import run_to_the_end, training_arguments
from nystrom_lab.training.tasks import (
    Model,
    check_data,
    default_folder,
    find_task,
    fingerprint,
    open_splits,
    prepare_if_missing,
    prepared_folder,
)


def train(asked: TrainOptions) -> Path:
    """Train a model on a task, choose its best checkpoint on the validation split, and evaluate it on the test split.

    With `mask_share` the model learns to predict masked tokens of the task's own inputs instead of their class, and the
    test split is not read: `nystrom pretrain TASK`. Another run can start from this encoder with `model`.

    `nystrom_lab.training.run_settings.train_options` makes the options from a preset. Under torchrun the processes
    share each batch. A run can be interrupted at any time and continued with `resume`.

    Returns:
        The folder of the run; the best model is in its folder best.

    Raises:
        ValueError: An invalid name, number, folder, device or precision; raised before data or model are created.
        FloatingPointError: The loss or a weight is no longer finite.
    """
    task, max_length = asked.task, asked.max_length
    start = None
    if asked.model is not None:
        from nystrom_lab.training.start import find_encoder

        start = find_encoder(Path(asked.model))
    name = asked.preset
    preset = find_preset(task, name) if max_length is None else lengthened(find_preset(task, name), max_length)
    parts = ["pretrain"] if asked.mask_share else []
    parts += [
        task,
        asked.attention,
        name,
        *(["pretrained"] if start else []),
        *([str(max_length)] if max_length else []),
    ]
    run = RunFolder(Path("runs") / "-".join([*parts, f"seed{asked.seed}"]) if asked.to is None else Path(asked.to))
    data = None if asked.data is None else Path(asked.data)
    if data is None:
        asked.check_no_columns("no data are named with --data")
        data = run.data_folder()
    check_data(task, data)
    settings = settle(
        replace(asked, data=data, to=run.path, resume=run.is_resumed(asked.resume)),
        num_positions=data_positions(preset, data) if max_length is None else max_length,
        start=start,
    )
    with run.held(settings, resume=settings.resume, main=is_main()):
        train_model(settings, preset, run)
        if settings.processes > 1:
            from nystrom_lab.training.ranks import leave

            leave()
    return run.path


def train_model(settings: Settings, preset: Preset, run: RunFolder) -> None:
    """Train with checked settings, and write the results.

    Args:
        preset: The preset whose data are used if the settings name none.
        run: The folder, which this process has locked.

    Raises:
        ValueError: Data that cannot be trained on, or a missing compiler.
        FloatingPointError: The loss or a weight is no longer finite.
        OSError: A file could not be written; the message names the folder and how to continue.
    """
    if settings.context_parallel > 1:
        from nystrom_lab.training.ranks import check_pieces

        config = settings.encoder_config()
        check_pieces(settings.context_parallel, lambda: _new_model(settings, config), compile=settings.compile)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    arguments = training_arguments(settings, settings, run, adam_epsilon=preset.adam_epsilon)
    if settings.compile and settings.denoise:
        raise ValueError(
            "compile is on, but denoise collects the states of all layers, which a compiled graph does not: leave one "
            "out."
        )
    if settings.compile:
        from nystrom_lab.training.compiling import check_compiler

        check_compiler(settings.device)
    with arguments.main_process_first(local=False):
        if settings.data is None:
            folder = default_folder(preset.data)
            prepare_if_missing(settings.task, folder, preset.data)
        else:
            folder = prepared_folder(settings.task, settings.data, max_length=settings.longest, columns=settings)
    splits = open_splits(
        settings.task,
        folder,
        num_positions=settings.longest,
        batch_size=settings.batch_size,
        test=not settings.mask_share,
    )
    digest = fingerprint(splits, folder)
    run.check_data(digest)
    if run.is_done(resume=settings.resume):
        return
    if is_main():
        run.start(settings, folder=str(folder.resolve()), fingerprint=digest)
    set_seed(settings.seed)
    with no_file_bars():
        model = start_model(settings, settings.encoder_config(splits.train.classes))
        kind = EncoderTrainer
        if settings.mask_share:
            from nystrom_lab.training.masked import MaskedTrainer as kind
        trainer = kind(model, arguments, settings=settings, splits=splits, run=run)
        words = replace(settings, data=settings.data or folder, to=run.path).words()
        run_to_the_end(trainer, resume=settings.resume, command=command_line(words, settings.processes))


def start_model(settings: Settings, config: EncoderConfig) -> Model | EncoderModel:
    """The model of a run: an encoder alone for masked tokens, or with a new head for classes.

    Args:
        settings: Settings of the run; if they name an encoder, its weights are used.

    Raises:
        ValueError: Weights that do not match; the message names them.
    """
    if settings.model is None:
        return _new_model(settings, config)
    from nystrom_lab.training.start import load_start

    encoder, _ = load_start(settings.model, EncoderModel, config=config)
    if settings.mask_share:
        return encoder
    model = find_task(settings.task).model(config)
    model.nystromformer.load_state_dict(encoder.state_dict())
    return model


def _new_model(settings: Settings, config: EncoderConfig) -> Model | EncoderModel:
    return EncoderModel(config) if settings.mask_share else find_task(settings.task).model(config)
