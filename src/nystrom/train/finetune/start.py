"""One fine-tuning, from what was asked to its results."""

import importlib.metadata
import importlib.util
import platform
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import EvalPrediction, set_seed

from nystrom.attention.backend import check_backend_device
from nystrom.tasks.language.labelled.glue import LabelledTask
from nystrom.tasks.language.labelled.splits import LabelledData
from nystrom.train.finetune.classifier import Start, find_start, make_classifier, takes_segments
from nystrom.train.finetune.encoding import EncodedSplit, collator, padding_of
from nystrom.train.finetune.finish import finish
from nystrom.train.finetune.scores import scores
from nystrom.train.finetune.settings import PRESET, FinetuneSettings, TrainingExtent
from nystrom.train.hardware import is_main, processes
from nystrom.train.results import command_line
from nystrom.train.run.folder import RunFolder
from nystrom.train.run.progress import no_file_bars
from nystrom.train.run.run_trainer import RunTrainer, training_arguments
from nystrom.train.run.to_the_end import train_to_the_end


def settle(
    task: str,
    start: Start,
    data: LabelledData,
    asked: TrainingExtent,
    *,
    max_length: int | None,
    learning_rate: float,
    accumulation: int,
    seed: int,
    device: str,
    precision: str,
) -> FinetuneSettings:
    """Everything that decides the result, checked.

    Raises:
        ValueError: A value that cannot be used.
    """
    longest = start.positions
    if max_length is None:
        max_length = PRESET.max_length if longest is None else min(PRESET.max_length, longest)
    elif longest is not None and max_length > longest:
        raise ValueError(
            f"max_length is {max_length} but model {start.folder} has {longest} positions: take fewer, or make more "
            f"with `nystrom convert {start.folder} --to OTHER --max-position-embeddings {max_length}`."
        )
    check_backend_device(start.options.get("backend", "auto"), torch.device(device))
    return FinetuneSettings(
        task=task,
        model=start.name,
        weights=start.weights,
        attention=start.attention,
        options=start.options,
        max_length=max_length,
        seed=seed,
        accumulation=accumulation,
        processes=processes(),
        learning_rate=learning_rate,
        device=device,
        precision=precision,
        **asked.in_steps(len(data.splits["train"].texts)),
    )


def finetune_model(
    name: str,
    task: LabelledTask,
    data: LabelledData,
    folder: str,
    *,
    model: str,
    attention: str | None,
    options: Mapping[str, Any] | None,
    asked: TrainingExtent,
    max_length: int | None,
    learning_rate: float,
    accumulation: int,
    seed: int,
    device: str,
    precision: str,
    run: RunFolder,
    resume: bool,
    threads: int | None,
    words: list[str],
) -> None:
    """Fine-tune a model on texts that were read; see `nystrom.train.finetune.engine.finetune`.

    Args:
        name: The task's name.
        task: The task.
        data: The texts.
        folder: Where they are from.
        model: The model to start from.
        attention: Method in place of its own.
        options: Options of the method.
        asked: How long to train.
        max_length: Tokens of a text, or a pair.
        learning_rate: At the end of the warm-up.
        accumulation: Parts of a batch.
        seed: Seed.
        device: "cpu" or "cuda".
        precision: What to compute in.
        run: The folder of the run.
        resume: Go on with the run in it.
        threads: Threads on the CPU; None for torch's choice.
        words: The command of the run, behind `nystrom`.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    with no_file_bars():
        start = find_start(model, attention=attention, options=options)
        settings = settle(
            name, start, data, asked, max_length=max_length, learning_rate=learning_rate, accumulation=accumulation,
            seed=seed, device=device, precision=precision,
        )  # fmt: skip
        with run.held(settings, resume=resume, main=is_main()):
            _run(settings, start, task, data, folder, run, resume=resume, words=words)


def _run(
    settings: FinetuneSettings,
    start: Start,
    task: LabelledTask,
    data: LabelledData,
    folder: str,
    run: RunFolder,
    *,
    resume: bool,
    words: list[str],
) -> None:
    digest = data.fingerprint()
    run.check_data(digest)
    set_seed(settings.seed)
    pairs = data.splits["train"].pairs is not None
    model = make_classifier(start, classes=data.classes, task=settings.task, pairs=pairs)
    segments = start.segments and takes_segments(model) and pairs
    splits = {
        name: EncodedSplit(split, start.tokenizer, max_length=settings.max_length, segments=segments)
        for name, split in data.splits.items()
    }
    collate = collator(padding_of(start.tokenizer))
    if is_main():
        versions = {
            name: importlib.metadata.version(name) for name in ("nystrom", "torch", "transformers", "accelerate")
        }
        run.start(
            settings,
            data={"folder": folder, "fingerprint": digest},
            versions={"python": platform.python_version(), **versions},
        )
    trainer = FinetuneTrainer(model, settings, task, data, splits, collate, run)
    train_to_the_end(trainer, resume=resume)
    if is_main():
        finish(
            trainer, model, start.tokenizer, data, splits, collate, task, settings, run,
            command=command_line(words, settings.processes),
        )  # fmt: skip
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


class FinetuneTrainer(RunTrainer):
    """The trainer of runs, with the metrics of a task; the first of them chooses the best checkpoint.

    Args:
        model: The model.
        settings: Settings of the run.
        task: The task.
        data: The texts.
        splits: The texts as tokens.
        collate: Makes a batch.
        run: The folder.
    """

    def __init__(
        self,
        model: Any,
        settings: FinetuneSettings,
        task: LabelledTask,
        data: LabelledData,
        splits: Mapping[str, EncodedSplit],
        collate: Any,
        run: RunFolder,
    ):
        reports = ["tensorboard"] if importlib.util.find_spec("tensorboard") else []
        quantities = {"loss": "train loss", "eval_loss": "validation loss"}
        quantities |= {f"eval_{metric}": f"validation {metric}" for metric in task.metrics}
        super().__init__(
            model,
            training_arguments(settings, PRESET, run, reports=reports, clip_norm=PRESET.clip_norm),
            settings=settings,
            train=splits["train"],
            validation=splits["validation"],
            collate=collate,
            run=run,
            quantities=quantities | {"learning_rate": "learning rate"},
            compute_metrics=partial(_scored, task=task, classes=data.classes is not None),
            preprocess_logits_for_metrics=_logits_alone,
        )


def _logits_alone(logits: Any, labels: torch.Tensor) -> torch.Tensor:
    """The logits, without what some models return beside them."""
    return (logits[0] if isinstance(logits, tuple) else logits).float()


def _scored(prediction: EvalPrediction, *, task: LabelledTask, classes: bool) -> dict[str, float]:
    logits, labels = np.asarray(prediction.predictions), np.asarray(prediction.label_ids)
    found = scores(logits, labels, task.metrics, classes=classes)
    return found | {"selection": found[task.metrics[0]]}
