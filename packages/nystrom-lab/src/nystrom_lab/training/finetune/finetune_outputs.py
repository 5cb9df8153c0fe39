"""The results of a finished fine-tuning: the best model with its tokenizer, predictions and rows."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from safetensors.torch import load_model
from transformers import PreTrainedModel

from nystrom.integrations.saving import save_with_attention
from nystrom_lab.data.language.labelled.glue import LabelledTask
from nystrom_lab.data.language.labelled.splits import LabelledData
from nystrom_lab.measure.rows import Row
from nystrom_lab.training.finetune.encoding import EncodedSplit
from nystrom_lab.training.finetune.finetune_settings import FinetuneSettings
from nystrom_lab.training.finetune.inference import BatchMaker, forget_kept, logits_of
from nystrom_lab.training.finetune.results import ResultRows, shown, write_predictions, write_submission
from nystrom_lab.training.finetune.scores import scores
from nystrom_lab.training.run.finished import best_folder, costs, write_curves, write_rows
from nystrom_lab.training.run.folder import RunFolder
from nystrom_lab.training.run.run_trainer import RunTrainer
from nystrom_lab.training.run.writing import written

# Test splits as they came; a labelled one may have been drawn from other texts.
_UNLABELLED = ("submission", "submission_mismatched")


def finish(
    trainer: RunTrainer,
    model: PreTrainedModel,
    tokenizer: Any,
    data: LabelledData,
    splits: dict[str, EncodedSplit],
    collate: BatchMaker,
    task: LabelledTask,
    settings: FinetuneSettings,
    run: RunFolder,
    *,
    command: str,
) -> None:
    """Write the best model, predictions, curves and results, the results last, and print them.

    Args:
        trainer: The trainer, after its last step.
        model: The model that was trained.
        tokenizer: Its tokenizer.
        data: The texts.
        splits: The texts as tokens.
        collate: Makes a batch.
        task: The task.
        settings: Settings of the run.
        run: The folder.
        command: The command that reproduces the run.

    Raises:
        OSError: A file could not be written; the message names it and how to continue.
    """
    took, best = costs(trainer, steps=settings.steps), write_curves(trainer, run)
    logits_by_split = best_logits(trainer, model, splits, collate, settings, run)
    tokenizer.model_max_length = settings.max_length
    with best_folder(run) as partial:
        save_with_attention(model, partial)
        tokenizer.save_pretrained(partial)
    rows = ResultRows(settings, model.config, published=data.published, command=command)
    results: list[Row] = []
    said: list[str] = []
    files = []
    for name, logits in logits_by_split.items():
        split = splits[name]
        if split.labels is not None:
            found = scores(logits, split.labels, task.metrics, classes=data.classes is not None)
            results += [rows.row(f"{name} {metric}", found[metric], samples=len(split)) for metric in task.metrics]
            said.append(f"{name}: {', '.join(shown(metric, found[metric]) for metric in task.metrics)} ({len(split)})")
            if rows.size is not None:
                share = split.longer_than(rows.size)
                results.append(rows.row(f"{name} texts longer than {rows.method}", share, samples=len(split)))
        files.append(run.path / "predictions" / f"{name}.tsv")
        with written(files[-1], "continue with --resume"):
            write_predictions(files[-1], logits, data.classes, split.labels)
            wanted = task.submission.get(name.replace("submission", "test"))
            if wanted is not None and not name.startswith("validation") and (data.published or name in _UNLABELLED):
                files.append(run.path / "predictions" / wanted)
                write_submission(files[-1], logits, task)
    write_rows(run, [*results, *(rows.row(*each) for each in took)])
    for name in logits_by_split:
        forget_kept(_kept(run, name, best))
    print("\n".join(said))
    print(
        f"best after step {best} of {settings.steps}; {took[0][1]:.0f} s of training\n"
        f"model       {run.best}\npredictions {', '.join(map(str, files))}\nrows        {run.rows}"
    )


def best_logits(
    trainer: RunTrainer,
    model: PreTrainedModel,
    splits: Mapping[str, EncodedSplit],
    collate: BatchMaker,
    settings: FinetuneSettings,
    run: RunFolder,
) -> dict[str, NDArray[Any]]:
    """The logits of the best model for each split except training; ranks that share texts must call it together.

    Args:
        trainer: The trainer, after its last step.
        model: The model that was trained; it gets the best weights.
        splits: The texts as tokens.
        collate: Makes a batch.
        settings: Settings of the run.
        run: The folder.
    """
    step = trainer.state.best_global_step
    assert step is not None
    load_model(model, run.checkpoint(step) / "model.safetensors")
    make = collate if trainer.pieces is None else trainer.pieces.collate(collate)
    size, device, precision = settings.part_size, settings.device, settings.precision
    found = {}
    for name, split in splits.items():
        if name != "train":
            kept = None if trainer.pieces is not None else _kept(run, name, step)
            found[name] = logits_of(model, split, make, batch_size=size, device=device, precision=precision, kept=kept)
    return found


def _kept(run: RunFolder, name: str, step: int) -> Path:
    """File with the logits of a split while it is being scored."""
    return run.path / "predictions" / f"{name}-step{step}.safetensors"
