"""Fine-tune an encoder on a task of GLUE, on IMDB, or on a user's labelled texts, from the options to the results.

Names, numbers, files and labels are checked first; then the model, its tokenizer and its attention, before anything is
trained.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_model
from transformers import EvalPrediction, PreTrainedTokenizerBase, set_seed

from nystrom.attention.backend import check_backend_device
from nystrom.attention.plan import PLAN, read_plan
from nystrom.checks import check_at_least
from nystrom.command_options import taking
from nystrom.integrations.bert_names import more_positions, positions_of
from nystrom.integrations.saving import save_with_attention
from nystrom_lab.config import PAPER_GRID, FinetuneOptions, SearchGrid, asked_words, command_line
from nystrom_lab.data.language.labelled.glue import NUMBER_METRICS, LabelledTask, find_labelled, own_task
from nystrom_lab.data.language.labelled.splits import LabelledData, read_labelled
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
    check_extent,
    in_steps,
    model_name,
)
from nystrom_lab.training.finetune.inference import logits_of
from nystrom_lab.training.finetune.results import ResultRows, shown, write_predictions, write_submission
from nystrom_lab.training.finetune.results import scores as metrics_of
from nystrom_lab.training.grid.slurm import Jobs
from nystrom_lab.training.hardware import is_main, processes, usable_device, usable_precision
from nystrom_lab.training.ranks import check_pieces, leaving_the_group
from nystrom_lab.training.run_folder import RunFolder, written
from nystrom_lab.training.run_progress import logged_with, no_file_bars
from nystrom_lab.training.run_trainer import RunResults, RunTrainer, run_to_the_end, training_arguments

OWN = "own"


@dataclass(frozen=True)
class Material:
    """The loaded texts, and their source.

    Attributes:
        name: The task's name.
        task: The task.
        data: The texts.
        folder: Their source folder.
        words: The command of the run, after `nystrom`.
    """

    name: str
    task: LabelledTask
    data: LabelledData
    folder: str
    words: tuple[str, ...]


def read_texts(asked: FinetuneOptions, words: tuple[str, ...]) -> Material:
    """Read the texts of a fine-tuning.

    Raises:
        ValueError: Broken or missing texts or labels.
    """
    task = chosen_task(asked)
    found = read_labelled(asked.data, task, own=asked.task is None, kind=asked.labels, val_share=asked.val_share)
    if asked.task is None and found.classes is None:
        task = replace(task, metrics=NUMBER_METRICS)
    return Material(asked.task or OWN, task, found, ", ".join(str(path.resolve()) for path in asked.data), words)


def chosen_task(asked: FinetuneOptions) -> LabelledTask:
    """The task, with the columns that were given.

    Raises:
        ValueError: An unknown task, or columns or labels that the task already fixes.
    """
    if asked.task is None:
        return own_task(**asked.columns())
    task = find_labelled(asked.task).with_fields(**asked.columns())
    if asked.labels != "auto":
        raise ValueError(f"labels is {asked.labels!r}, but {asked.task} has fixed labels: leave it out.")
    return task


@taking(FinetuneOptions)
def finetune(asked: FinetuneOptions) -> Path:
    """Fine-tune a model, choose its best checkpoint on the validation split, evaluate it, and write its predictions.

    The defaults are the paper's: batches of 32, AdamW at 3e-5, 4 epochs. A run can be interrupted at any time and
    continued by the same command with `resume`.

    Returns:
        The folder of the run; the best model is in its folder best, predictions are in predictions.

    Raises:
        ValueError: An invalid name, number, file, label, model, device or precision, or failed jobs.
        FloatingPointError: The loss or a weight is no longer finite.
    """
    if asked.plan is not None and (asked.attention is not None or asked.options):
        raise ValueError(
            "plan sets the method of each layer, and attention or its options are also given: leave one out."
        )
    planned = None if asked.plan is None else read_plan(asked.plan)
    asked = replace(asked, data=tuple(asked.data))
    check_extent(asked)
    chosen_task(asked)
    if asked.search and asked.grid:
        raise ValueError(
            f"search asks for the paper's grid, and {', '.join(f'search.{name}' for name in asked.grid.values())} for "
            "another: leave one out."
        )
    grid = PAPER_GRID if asked.search else asked.grid
    _check_searched(grid, asked)
    _check_jobs(asked, searches=bool(grid))
    method = asked.attention if planned is None else "plan"
    name = "-".join(
        ["finetune", asked.task or OWN, model_name(asked.model).replace("/", "-"), *([method] if method else [])]
    )
    run = RunFolder(Path(asked.to or Path("runs") / f"{name}-seed{asked.seed}"))
    elsewhere, slurm = asked.on == "slurm", asked.slurm
    device = slurm.device(asked.device, asked.precision) if elsewhere else usable_device(asked.device)
    precision = usable_precision(asked.precision, device, has_bfloat16=elsewhere or None)
    asked = replace(asked, to=run.path, device=device, precision=precision)
    words = ("finetune", *([] if asked.task is None else [asked.task]), *asked_words(asked, options=""))
    cluster = None
    if elsewhere:
        asked = replace(asked, threads=asked.threads or 1)
        cluster = Jobs(run.path, slurm, cpus=asked.threads or 1, at_once=asked.jobs)
    if planned is not None:
        asked = replace(asked, attention=PLAN, options=planned.options, plan=None)
    material = read_texts(asked, words)
    if is_main():
        for remark in material.data.remarks:
            print(f"notice: {remark}.", flush=True)
    asked = replace(asked, grid=grid, resume=run.is_resumed(asked.resume))
    finetune_model(asked, run, material, cluster)
    return run.path


def _check_searched(grid: SearchGrid, asked: FinetuneOptions) -> None:
    """Raise ValueError if a value is given that is also searched."""
    defaults = {entry.name: entry.default for entry in fields(FinetuneOptions)}
    for name in grid.values():
        if getattr(asked, name) != defaults[name]:
            raise ValueError(
                f"{name} is given, but the search tries other values: leave it out, or name it in search.{name}."
            )
    if asked.steps is not None and grid.epochs:
        raise ValueError("steps are given, but the search tries numbers of epochs: leave steps or search.epochs out.")


def _check_jobs(asked: FinetuneOptions, *, searches: bool) -> None:
    """Check the cluster options before submitting jobs."""
    asked.slurm.check(asked.on)
    if asked.on == "slurm" and not searches:
        raise ValueError(
            "on is 'slurm' but nothing is searched: add --search, or start a single fine-tuning in your own job, with "
            "sbatch."
        )
    if asked.on == "local" and asked.jobs is not None:
        raise ValueError(f"jobs is {asked.jobs} but on is 'local', where trials run one at a time: add --on slurm.")
    check_at_least("jobs", 1 if asked.jobs is None else asked.jobs, 1)


# Test splits as they came; a labelled one may have been drawn from other texts.
_UNLABELLED = ("submission", "submission_mismatched")


@leaving_the_group
def finetune_model(asked: FinetuneOptions, run: RunFolder, material: Material, cluster: Jobs | None) -> None:
    """Fine-tune a model on loaded texts, or search; see `finetune`.

    Args:
        asked: The user's options, with device and precision resolved from "auto".
        run: The folder of the run, or of the search.
        cluster: Cluster on which the trials of a search run as jobs; None for this machine.
    """
    if asked.threads is not None and cluster is None:
        torch.set_num_threads(asked.threads)
    with no_file_bars():
        start = find_classifier(asked.model, attention=asked.attention, options=asked.options)
        if asked.grid:
            from nystrom_lab.training.finetune.search import search, search_in_jobs

            if cluster is None:
                search(asked, start, material)
            else:
                search_in_jobs(asked, start, material, cluster)
            return
        settings = settle(start, material, asked)
        with run.held(settings, resume=asked.resume, main=is_main()):
            run.check_data(material.data.fingerprint())
            if not run.is_done(resume=asked.resume):
                run_once(start, material, settings, run, resume=asked.resume)


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
    given: dict[str, Any] = (
        vars(asked)
        | in_steps(asked, len(material.data.splits["train"].texts))
        | {
            "task": material.name,
            "model": start.name,
            "attention": start.attention,
            "options": start.options,
            "max_length": max_length,
        }
    )
    return FinetuneSettings(**given, fingerprint=start.fingerprint, processes=processes())


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


class FinetuneTrainer(RunTrainer[FinetuneSettings]):
    """The trainer of fine-tuning runs; the first metric of the task selects the best checkpoint."""

    def __init__(
        self,
        model: Any,
        settings: FinetuneSettings,
        material: Material,
        splits: Mapping[str, EncodedSplit],
        tokenizer: PreTrainedTokenizerBase,
        run: RunFolder,
    ):
        self.material, self.splits, self.tokenizer = material, splits, tokenizer
        self.batch_maker = collator(padding_of(tokenizer), most=settings.max_length)
        task, classes = material.task, material.data.classes is not None
        super().__init__(
            model,
            training_arguments(settings, OPTIMIZER, run, adam_epsilon=ADAM_EPSILON),
            settings=settings,
            train=splits["train"],
            validation=splits["validation"],
            collate=self.batch_maker,
            run=run,
            quantities=logged_with(**{f"eval_{metric}": f"validation {metric}" for metric in task.metrics}),
            compute_metrics=partial(_scored, task=task, classes=classes),
            preprocess_logits_for_metrics=_logits_alone,
        )

    def score_best(self, step: int) -> tuple[Any, Any]:
        """The best model, and its logits for each split except training."""
        settings, run, pieces = self.settings, self.run, self.pieces
        load_model(self.network, run.checkpoint(step) / "model.safetensors")
        make = self.batch_maker if pieces is None else pieces.collate(self.batch_maker)
        size, device, precision = settings.part_size, settings.device, settings.precision
        score = partial(logits_of, self.network, collate=make, batch_size=size, device=device, precision=precision)
        return self.network, {name: score(split) for name, split in self.splits.items() if name != "train"}

    def save_best(self, model: Any, folder: Path) -> None:
        """Save the best model with its attention and tokenizer."""
        self.tokenizer.model_max_length = self.settings.max_length
        save_with_attention(model, folder)
        self.tokenizer.save_pretrained(folder)

    def results(self, model: Any, scores: Any, command: str) -> RunResults:
        """The metrics of each split that has labels, and the files of its predictions."""
        data, task = self.material.data, self.material.task
        rows = ResultRows(self.settings, model.config, published=data.published, command=command)
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
        said.append(f"best after step {self.state.best_global_step} of {self.settings.steps}")
        return RunResults(results, rows.row, "\n".join(said), {"predictions": ", ".join(map(str, files))})


def _logits_alone(logits: Any, labels: torch.Tensor) -> torch.Tensor:
    """The logits, without the other outputs of some models."""
    return (logits[0] if isinstance(logits, tuple) else logits).float()


def _scored(prediction: EvalPrediction, *, task: LabelledTask, classes: bool) -> dict[str, float]:
    logits, labels = np.asarray(prediction.predictions), np.asarray(prediction.label_ids)
    found = metrics_of(logits, labels, task.metrics, classes=classes)
    return found | {"selection": found[task.metrics[0]]}
