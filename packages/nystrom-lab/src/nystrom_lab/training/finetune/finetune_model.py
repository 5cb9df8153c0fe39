"""One fine-tuning, from a user's choices to the results."""

from collections.abc import Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_model
from transformers import EvalPrediction, PreTrainedTokenizerBase, set_seed

from nystrom.attention.backend import check_backend_device
from nystrom.integrations.bert_names import more_positions, positions_of
from nystrom.integrations.saving import save_with_attention
from nystrom_lab.config import FinetuneOptions, command_line
from nystrom_lab.data.language.labelled.glue import LabelledTask
from nystrom_lab.measure.rows import Row
from nystrom_lab.training.finetune.classifier import (
    StartClassifier,
    blank_classifier,
    find_classifier,
    make_classifier,
    takes_segments,
)
from nystrom_lab.training.finetune.encoding import EncodedSplit, collator, padding_of
from nystrom_lab.training.finetune.finetune_settings import (
    ADAM_EPSILON,
    MAX_LENGTH,
    OPTIMIZER,
    FinetuneSettings,
    in_steps,
)
from nystrom_lab.training.finetune.inference import forget_kept, logits_of
from nystrom_lab.training.finetune.request import Material, Request
from nystrom_lab.training.finetune.results import ResultRows, shown, write_predictions, write_submission
from nystrom_lab.training.finetune.scores import scores as metrics_of
from nystrom_lab.training.grid.slurm import Jobs
from nystrom_lab.training.hardware import is_main, processes
from nystrom_lab.training.ranks.lost import leaving_the_group
from nystrom_lab.training.ranks.pieces import check_pieces
from nystrom_lab.training.run.folder import RunFolder, written
from nystrom_lab.training.run.progress import no_file_bars
from nystrom_lab.training.run.run_trainer import RunResults, RunTrainer, run_to_the_end, training_arguments

# Test splits as they came; a labelled one may have been drawn from other texts.
_UNLABELLED = ("submission", "submission_mismatched")


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
            if not run.is_done(resume=resume):
                run_once(start, material, settings, run, resume=resume)


def settle(start: StartClassifier, material: Material, asked: FinetuneOptions) -> FinetuneSettings:
    """Resolve and check all settings that determine the result of a run.

    Raises:
        ValueError: An invalid value.
    """
    longest, max_length = positions_of(start.config), asked.max_length
    if max_length is None:
        max_length = MAX_LENGTH if longest is None else min(MAX_LENGTH, longest)
    elif longest is not None and max_length > longest:
        raise ValueError(
            f"max_length is {max_length} but model {start.folder} has {longest} positions: "
            f"take fewer, or {more_positions(start.config, max_length, start.folder)}."
        )
    check_pieces(asked.context_parallel, partial(blank_classifier, start))
    check_backend_device(start.options.get("backend", "auto"), torch.device(asked.device))
    given: dict[str, Any] = {entry.name: getattr(asked, entry.name) for entry in fields(FinetuneOptions)}
    given |= in_steps(asked, len(material.data.splits["train"].texts)) | {
        "task": material.name,
        "model": start.name,
        "attention": start.attention,
        "options": start.options,
        "max_length": max_length,
    }
    return FinetuneSettings(**given, weights=start.weights, processes=processes())


def run_once(
    start: StartClassifier,
    material: Material,
    settings: FinetuneSettings,
    run: RunFolder,
    *,
    resume: bool,
    score: bool = True,
) -> RunTrainer:
    """Train with these settings, in a folder that this process has locked.

    Args:
        start: The model.
        material: The texts.
        settings: Settings of the run.
        run: The folder.
        resume: Continue the run in it.
        score: Evaluate the best checkpoint, and write its model, predictions and rows.

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
    if is_main():
        run.start(settings, folder=material.folder, fingerprint=digest)
    trainer = FinetuneTrainer(model, settings, material, splits, start.tokenizer, run)
    run_to_the_end(trainer, resume=resume, command=command_line(material.words, settings.processes), score=score)
    return trainer


class FinetuneTrainer(RunTrainer):
    """The trainer of fine-tuning runs; the first metric of the task selects the best checkpoint.

    Args:
        model: The model.
        settings: Settings of the run.
        material: The texts and their task.
        splits: The texts as tokens.
        tokenizer: The tokenizer.
        run: The folder.
    """

    def __init__(
        self,
        model: Any,
        settings: FinetuneSettings,
        material: Material,
        splits: Mapping[str, EncodedSplit],
        tokenizer: PreTrainedTokenizerBase,
        run: RunFolder,
    ):
        self.chosen, self.material, self.splits, self.tokenizer = settings, material, splits, tokenizer
        self.batch_maker = collator(padding_of(tokenizer), most=settings.max_length)
        task, classes = material.task, material.data.classes is not None
        quantities = {"loss": "train loss", "eval_loss": "validation loss"}
        quantities |= {f"eval_{metric}": f"validation {metric}" for metric in task.metrics}
        super().__init__(
            model,
            training_arguments(settings, OPTIMIZER, run, adam_epsilon=ADAM_EPSILON),
            settings=settings,
            train=splits["train"],
            validation=splits["validation"],
            collate=self.batch_maker,
            run=run,
            quantities=quantities | {"learning_rate": "learning rate", "grad_norm": "gradient norm"},
            compute_metrics=partial(_scored, task=task, classes=classes),
            preprocess_logits_for_metrics=_logits_alone,
        )

    def score_best(self, step: int) -> tuple[Any, Any]:
        """The best model, and its logits for each split except training."""
        settings, run, pieces = self.chosen, self.run, self.pieces
        load_model(self.network, run.checkpoint(step) / "model.safetensors")
        make = self.batch_maker if pieces is None else pieces.collate(self.batch_maker)
        size, device, precision = settings.part_size, settings.device, settings.precision
        found = {}
        for name, split in self.splits.items():
            if name != "train":
                found[name] = logits_of(
                    self.network, split, make, batch_size=size, device=device, precision=precision,
                    kept=None if pieces is not None else self._kept(name),
                )  # fmt: skip
        return self.network, found

    def save_best(self, model: Any, folder: Path) -> None:
        """Save the best model with its attention and tokenizer."""
        self.tokenizer.model_max_length = self.chosen.max_length
        save_with_attention(model, folder)
        self.tokenizer.save_pretrained(folder)

    def results(self, model: Any, scores: Any, command: str) -> RunResults:
        """The metrics of each split that has labels, and the files of its predictions."""
        data, task = self.material.data, self.material.task
        rows = ResultRows(self.chosen, model.config, published=data.published, command=command)
        results: list[Row] = []
        said: list[str] = []
        files: list[Path] = []
        for name, logits in scores.items():
            split = self.splits[name]
            if split.labels is not None:
                found = metrics_of(logits, split.labels, task.metrics, classes=data.classes is not None)
                results += [rows.row(f"{name} {metric}", found[metric], samples=len(split)) for metric in task.metrics]
                said.append(
                    f"{name}: {', '.join(shown(metric, found[metric]) for metric in task.metrics)} ({len(split)})"
                )
                if rows.size is not None:
                    share = split.longer_than(rows.size)
                    results.append(rows.row(f"{name} texts longer than {rows.method}", share, samples=len(split)))
            files.append(self.run.path / "predictions" / f"{name}.tsv")
            with written(files[-1], "continue with --resume"):
                write_predictions(files[-1], logits, data.classes, split.labels)
                wanted = task.submission.get(name.replace("submission", "test"))
                if wanted is not None and not name.startswith("validation") and (data.published or name in _UNLABELLED):
                    files.append(self.run.path / "predictions" / wanted)
                    write_submission(files[-1], logits, task)
        said.append(f"best after step {self.state.best_global_step} of {self.chosen.steps}")
        return RunResults(results, rows.row, "\n".join(said), {"predictions": ", ".join(map(str, files))})

    def finish(self, command: str) -> None:
        """Finish, and remove the logits that were kept while the splits were scored."""
        super().finish(command)
        if is_main():
            for name in self.splits:
                forget_kept(self._kept(name))

    def _kept(self, name: str) -> Path:
        """File with the logits of a split while it is being scored."""
        return self.run.path / "predictions" / f"{name}-step{self.state.best_global_step}.safetensors"


def _logits_alone(logits: Any, labels: torch.Tensor) -> torch.Tensor:
    """The logits, without the other outputs of some models."""
    return (logits[0] if isinstance(logits, tuple) else logits).float()


def _scored(prediction: EvalPrediction, *, task: LabelledTask, classes: bool) -> dict[str, float]:
    logits, labels = np.asarray(prediction.predictions), np.asarray(prediction.label_ids)
    found = metrics_of(logits, labels, task.metrics, classes=classes)
    return found | {"selection": found[task.metrics[0]]}
