"""One fine-tuning, from a user's choices to the results."""

import importlib.util
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import EvalPrediction, set_seed

from nystrom.attention.backend import check_backend_device
from nystrom.integrations.bert_names import more_positions, positions_of
from nystrom_lab.data.language.labelled.glue import LabelledTask
from nystrom_lab.data.language.labelled.splits import LabelledData
from nystrom_lab.training.command import command_line
from nystrom_lab.training.finetune.classifier import (
    StartClassifier,
    blank_classifier,
    find_classifier,
    make_classifier,
    takes_segments,
)
from nystrom_lab.training.finetune.encoding import EncodedSplit, collator, padding_of
from nystrom_lab.training.finetune.finetune_outputs import best_logits, finish
from nystrom_lab.training.finetune.finetune_settings import PRESET, FinetuneSettings
from nystrom_lab.training.finetune.request import FinetuneOptions, Material, Request
from nystrom_lab.training.finetune.scores import scores
from nystrom_lab.training.grid.slurm import Jobs
from nystrom_lab.training.hardware import TIMEOUT, is_main, processes
from nystrom_lab.training.ranks.lost import leaving_the_group, naming_lost_ranks
from nystrom_lab.training.ranks.pieces import check_pieces
from nystrom_lab.training.run.arguments import training_arguments
from nystrom_lab.training.run.finished import is_done
from nystrom_lab.training.run.folder import RunFolder
from nystrom_lab.training.run.progress import no_file_bars
from nystrom_lab.training.run.run_trainer import RunTrainer
from nystrom_lab.training.run.to_the_end import train_to_the_end
from nystrom_lab.training.versions import versions


@leaving_the_group
def finetune_model(request: Request, material: Material, *, resume: bool, cluster: Jobs | None) -> None:
    """Fine-tune a model on loaded texts, or search; see `nystrom_lab.training.finetune.finetune.finetune`.

    Args:
        request: The user's request.
        material: The texts.
        resume: Continue the run in the folder.
        cluster: Cluster on which the trials of a search run as jobs; None for this machine.
    """
    asked = request.asked
    if asked.threads is not None and cluster is None:
        torch.set_num_threads(asked.threads)
    with no_file_bars():
        start = find_classifier(asked.model, attention=asked.attention, options=asked.options)
        if request.grid is not None:
            from nystrom_lab.training.finetune.search import jobs, search

            if cluster is None:
                search.search(request, start, material, resume=resume)
            else:
                jobs.search_in_jobs(request, start, material, cluster, resume=resume)
            return
        settings, run = settle(start, material, asked), RunFolder(request.folder)
        with run.held(settings, resume=resume, main=is_main()):
            run.check_data(material.data.fingerprint())
            if not is_done(run, resume=resume):
                run_once(start, material, settings, run, resume=resume, timeout=asked.timeout)


def settle(start: StartClassifier, material: Material, asked: FinetuneOptions) -> FinetuneSettings:
    """Resolve and check all settings that determine the result of a run.

    Raises:
        ValueError: An invalid value.
    """
    longest, max_length = positions_of(start.config), asked.max_length
    if max_length is None:
        max_length = PRESET.max_length if longest is None else min(PRESET.max_length, longest)
    elif longest is not None and max_length > longest:
        raise ValueError(
            f"max_length is {max_length} but model {start.folder} has {longest} positions: "
            f"take fewer, or {more_positions(start.config, max_length, start.folder)}."
        )
    check_pieces(asked.context_parallel, partial(blank_classifier, start))
    check_backend_device(start.options.get("backend", "auto"), torch.device(asked.device))
    return FinetuneSettings(
        task=material.name,
        model=start.name,
        weights=start.weights,
        attention=start.attention,
        options=start.options,
        max_length=max_length,
        seed=asked.seed,
        accumulation=asked.accumulation,
        processes=processes(),
        learning_rate=asked.learning_rate,
        device=asked.device,
        precision=asked.precision,
        context_parallel=asked.context_parallel,
        **asked.extent.in_steps(len(material.data.splits["train"].texts)),
    )


def run_once(
    start: StartClassifier,
    material: Material,
    settings: FinetuneSettings,
    run: RunFolder,
    *,
    resume: bool,
    score: bool = True,
    timeout: int = TIMEOUT,
) -> RunTrainer:
    """Train with these settings, in a folder that this process has locked.

    Args:
        start: The model.
        material: The texts.
        settings: Settings of the run.
        run: The folder.
        resume: Continue the run in it.
        score: Evaluate the best checkpoint, and write its model, predictions and rows.
        timeout: Seconds to wait for the other processes.

    Returns:
        The trainer, after its last step.
    """
    data = material.data
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
    collate = collator(padding_of(start.tokenizer), most=settings.max_length)
    if is_main():
        run.start(
            settings,
            data={"folder": material.folder, "fingerprint": digest},
            versions=versions(),
        )
    trainer = FinetuneTrainer(model, settings, material.task, data, splits, collate, run, timeout=timeout)
    train_to_the_end(trainer, resume=resume)
    with naming_lost_ranks(lambda: "while it scored", trainer.remedy):
        if score and is_main():
            finish(
                trainer, model, start.tokenizer, data, splits, collate, material.task, settings, run,
                command=command_line(material.words, settings.processes),
            )  # fmt: skip
        elif score and trainer.pieces is not None and trainer.pieces.with_main:
            best_logits(trainer, model, splits, collate, settings, run)
    return trainer


class FinetuneTrainer(RunTrainer):
    """The trainer of fine-tuning runs; the first metric of the task selects the best checkpoint.

    Args:
        model: The model.
        settings: Settings of the run.
        task: The task.
        data: The texts.
        splits: The texts as tokens.
        collate: Makes a batch.
        run: The folder.
        timeout: Seconds to wait for the other processes.
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
        *,
        timeout: int = TIMEOUT,
    ):
        reports = ["tensorboard"] if importlib.util.find_spec("tensorboard") else []
        quantities = {"loss": "train loss", "eval_loss": "validation loss"}
        quantities |= {f"eval_{metric}": f"validation {metric}" for metric in task.metrics}
        super().__init__(
            model,
            training_arguments(settings, PRESET, run, reports=reports, clip_norm=PRESET.clip_norm, timeout=timeout),
            settings=settings,
            train=splits["train"],
            validation=splits["validation"],
            collate=collate,
            run=run,
            quantities=quantities | {"learning_rate": "learning rate", "grad_norm": "gradient norm"},
            compute_metrics=partial(_scored, task=task, classes=data.classes is not None),
            preprocess_logits_for_metrics=_logits_alone,
        )


def _logits_alone(logits: Any, labels: torch.Tensor) -> torch.Tensor:
    """The logits, without the other outputs of some models."""
    return (logits[0] if isinstance(logits, tuple) else logits).float()


def _scored(prediction: EvalPrediction, *, task: LabelledTask, classes: bool) -> dict[str, float]:
    logits, labels = np.asarray(prediction.predictions), np.asarray(prediction.label_ids)
    found = scores(logits, labels, task.metrics, classes=classes)
    return found | {"selection": found[task.metrics[0]]}
