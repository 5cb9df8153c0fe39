"""Train a model on a task, and score a saved one.

Everything that decides the result is settled and checked first; then come the data, the model and the Trainer
(`nystrom.train.trainer`). With the same machine and number of processes a run that was killed and resumed ends
with the weights and the curves of an unbroken one.
"""

import importlib.metadata
import importlib.util
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import set_seed
from transformers.utils import logging

from nystrom.checks import check_at_least
from nystrom.measure.rows import Row
from nystrom.train.compiling import check_compiler
from nystrom.train.data import (
    check_data,
    check_lengths,
    class_names,
    default_folder,
    find_task,
    fingerprint,
    open_splits,
    prepare_if_missing,
    prepared_folder,
)
from nystrom.train.finish import finish
from nystrom.train.lengths import data_positions
from nystrom.train.presets.published import Preset, find_preset
from nystrom.train.results import Place, accuracy_row
from nystrom.train.run_folder import RunFolder
from nystrom.train.scoring import accuracy, load_model, positions
from nystrom.train.settings import Device, Precision, Settings, is_main, settle, usable_device, usable_precision
from nystrom.train.trainer import EncoderTrainer, NotFinite, training_arguments


def train(
    task: str,
    *,
    attention: str = "nystrom",
    options: Mapping[str, object] | None = None,
    preset: str = "nystromformer",
    data: Path | None = None,
    to: Path | None = None,
    seed: int = 0,
    resume: bool = False,
    steps: int | None = None,
    batch_size: int | None = None,
    accumulation: int = 1,
    learning_rate: float | None = None,
    warmup_steps: int | None = None,
    dropout: float | None = None,
    conv_kernel_size: int | None = None,
    evaluate_every: int | None = None,
    log_every: int | None = None,
    precision: Precision = "auto",
    device: Device = "auto",
    compile: bool = False,
    threads: int | None = None,
) -> Path:
    """Train a model on a task, choose its best checkpoint on the validation split, and score that on the test split.

    What is not given has the preset's value. Under torchrun the processes share each batch. Interrupt it at any time
    and go on with `resume`.

    Args:
        task: Task, such as "listops".
        attention: Method, a name of `nystrom methods`.
        options: Options of the method.
        preset: "nystromformer" or "skyformer", as published, or "demo" for a few minutes on two cores.
        data: Prepared data; data/TASK, or data/TASK-demo for the demo, which is made when it is missing and can be. A
            resumed run knows its own. For text also your own labelled texts (.csv, .tsv, .jsonl, or a folder of them),
            prepared under data/. For pathfinder pictures of any size: the model has a position for each pixel.
        to: Folder of the run; runs/TASK-ATTENTION-PRESET-seedSEED.
        seed: Decides start weights, order of the samples and dropout.
        resume: Go on with the run in the folder, from its last complete checkpoint.
        steps: Steps.
        batch_size: Samples per step, over all processes and accumulated parts.
        accumulation: Parts that a process computes its share of a batch in, to save memory; in evaluations too.
        learning_rate: Learning rate at the end of the warm-up.
        warmup_steps: Steps of linear warm-up.
        dropout: Dropout on the hidden states.
        conv_kernel_size: Size of the convolution of the values that is added to the attention; 0 for none.
        evaluate_every: Steps between evaluations, each followed by a checkpoint.
        log_every: Steps between points of the training curve; divides evaluate_every.
        precision: "auto" is bfloat16 autocast on an accelerator that has it, and float32 elsewhere.
        device: "auto" is an accelerator where there is one.
        compile: Compile the model, and pad every batch to the model's positions, so that one graph serves all steps.
        threads: Threads on the CPU; torch's choice if not given.

    Returns:
        The folder of the run; the best model is in its folder best.

    Raises:
        ValueError: A name, number, folder, device or precision that cannot be used; before data or model are made.
        FloatingPointError: The loss or a weight is no longer finite.
    """
    chosen = find_preset(task, preset)
    run = RunFolder(Path("runs") / f"{task}-{attention}-{preset}-seed{seed}" if to is None else Path(to))
    data = run.data_folder() if data is None else Path(data)
    check_data(task, data)
    settings = settle(
        task,
        attention=attention,
        options=options,
        conv_kernel_size=conv_kernel_size,
        preset=preset,
        device=device,
        precision=precision,
        accumulation=accumulation,
        seed=seed,
        changes={
            "steps": steps,
            "batch_size": batch_size,
            "learning_rate": learning_rate,
            "warmup_steps": warmup_steps,
            "dropout": dropout,
            "evaluate_every": evaluate_every,
            "log_every": log_every,
        },
        positions=data_positions(chosen, data),
        compile=compile,
    )
    if threads is not None:
        check_at_least("threads", threads, 1)
    run.check(settings, resume=resume, main=is_main())
    if threads is not None:
        torch.set_num_threads(threads)
    trainer = _trainer(settings, chosen, data, run)
    with _no_file_bars():
        _run(trainer, settings, run, resume=resume)
        if is_main():
            finish(trainer, settings, run)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return run.path


def evaluate(
    task: str,
    *,
    model: Path,
    data: Path,
    split: str = "test",
    batch_size: int = 64,
    precision: Precision = "auto",
    device: Device = "auto",
) -> Row:
    """Score a saved model on one split, every sample of it.

    Args:
        task: Task, such as "listops".
        model: Folder of a saved model, such as RUN/best.
        data: Prepared data, or what `train` was given in their place.
        split: train, val or test.
        batch_size: Samples at a time; changes nothing but speed and memory.
        precision: "auto" is bfloat16 autocast on an accelerator that has it, and float32 elsewhere.
        device: "auto" is an accelerator where there is one.

    Returns:
        The accuracy as a row of `nystrom.measure.rows`, between 0 and 1, with its 95 % interval.

    Raises:
        ValueError: A name, folder, device or precision that cannot be used, or a model of another task or of other
            classes.
    """
    check_at_least("batch_size", batch_size, 1)
    device = usable_device(device)  # pyright: ignore[reportAssignmentType]
    precision = usable_precision(precision, device)  # pyright: ignore[reportAssignmentType]
    check_data(task, Path(data))
    wanted = find_task(task)
    folder = prepared_folder(task, Path(data), max_length=positions(Path(model)))
    samples = wanted.open(folder, split)
    with _no_file_bars():
        loaded = load_model(Path(model), task, wanted, classes=class_names(samples))
    check_lengths(folder, split, samples, loaded.config.max_position_embeddings)
    share = accuracy(loaded, samples, wanted, batch_size=batch_size, device=device, precision=precision)
    place = Place(device=device, precision=precision, seed=None)
    return accuracy_row(loaded.config, f"{split} accuracy", share, len(samples), place)


@contextmanager
def _no_file_bars() -> Iterator[None]:
    """Silence the bar that transformers draws for each file; the bars of the steps are not among them."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _trainer(settings: Settings, preset: Preset, data: Path | None, run: RunFolder) -> EncoderTrainer:
    """Data, model and Trainer."""
    reports = ["tensorboard"] if importlib.util.find_spec("tensorboard") else []
    arguments = training_arguments(settings, preset, run, reports=reports)
    if settings.compile:
        check_compiler(settings.device)
    with arguments.main_process_first(local=False):
        if data is None:
            folder = default_folder(preset.data)
            prepare_if_missing(settings.task, folder, preset.data)
        else:
            folder = prepared_folder(settings.task, data, max_length=settings.max_length)
    splits = open_splits(settings.task, folder, positions=settings.max_length, batch_size=settings.batch_size)
    digest = fingerprint(splits)
    run.check_data(digest)
    if is_main():
        versions = {
            name: importlib.metadata.version(name) for name in ("nystrom", "torch", "transformers", "accelerate")
        }
        run.start(
            settings,
            data={"folder": str(folder.resolve()), "fingerprint": digest},
            versions={"python": platform.python_version(), **versions},
        )
    set_seed(settings.seed)
    model = find_task(settings.task).model(settings.encoder_config(class_names(splits.train)))
    return EncoderTrainer(model, arguments, settings=settings, preset=preset, splits=splits, run=run)


def _run(trainer: EncoderTrainer, settings: Settings, run: RunFolder, *, resume: bool) -> None:
    """Train to the last step, from the last complete checkpoint where there is one."""
    step = run.last_step() if resume else None
    trainer.accelerator.wait_for_everyone()
    if is_main():
        run.remove_after(step)
        if resume:
            print(
                f"Going on after step {step}." if step else "There is no complete checkpoint yet: starting at step 1."
            )
    trainer.accelerator.wait_for_everyone()
    try:
        trainer.train(resume_from_checkpoint=None if step is None else str(run.checkpoint(step)))
    except NotFinite as error:
        good = run.last_step()
        where = (
            "there is no checkpoint before it"
            if good is None
            else f"the last good checkpoint is {run.checkpoint(good)}"
        )
        raise NotFinite(
            f"{error}; {where}. Start another run with a lower --learning-rate"
            f"{'' if settings.precision == 'float32' else ' or with --precision float32'}."
        ) from error
    except KeyboardInterrupt:
        if is_main():
            print(
                f"\nStopped in step {trainer.state.global_step + 1} of {settings.steps}; go on with --resume, "
                f"from step {run.last_step() or 0}."
            )
        raise
