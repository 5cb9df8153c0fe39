"""One fine-tuning: its texts, its settings, its trainer and its results; `finetune` runs one, `search` runs several."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_model
from transformers import EvalPrediction, PreTrainedTokenizerBase

from nystrom.attention.backend import check_backend_device
from nystrom.integrations.bert_names import more_positions, positions_of
from nystrom.integrations.saving import save_with_attention
from nystrom_lab.config import FinetuneOptions
from nystrom_lab.data.language.labelled.glue import LabelledTask
from nystrom_lab.measure.rows import Row
from nystrom_lab.training.finetune.classifier import (
    StartClassifier,
    blank_classifier,
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
from nystrom_lab.training.finetune.inference import logits_of
from nystrom_lab.training.finetune.inputs import LabelledInputs
from nystrom_lab.training.finetune.results import ResultRows, shown, write_predictions, write_submission
from nystrom_lab.training.finetune.results import scores as metrics_of
from nystrom_lab.training.hardware import processes
from nystrom_lab.training.life import Data, Kind
from nystrom_lab.training.ranks import check_pieces
from nystrom_lab.training.run_folder import RunFolder, written
from nystrom_lab.training.run_progress import logged_with
from nystrom_lab.training.run_trainer import RunResults, RunTrainer, training_arguments

# Test splits as they came; a labelled one may have been drawn from other texts.
_UNLABELLED = ("submission", "submission_mismatched")


class FinetuneRun(Kind[FinetuneOptions, FinetuneSettings]):
    """A fine-tuning on texts that are read.

    Args:
        options: The options, with device and precision already resolved from "auto".
        run: The folder of the run.
        start: The model to start from.
        labelled: The texts.
    """

    def __init__(self, options: FinetuneOptions, run: RunFolder, start: StartClassifier, labelled: LabelledInputs):
        super().__init__(options, run)
        self.start, self.labelled = start, labelled

    def settings(self) -> FinetuneSettings:
        """Resolve the settings for the model and the texts, and check that the model can be cut and run by them."""
        start, options, data = self.start, self.options, self.labelled.data
        longest, max_length = positions_of(start.config), options.max_length
        if max_length is None:
            max_length = MAX_LENGTH if longest is None else min(MAX_LENGTH, longest)
        elif longest is not None and max_length > longest:
            raise ValueError(
                f"max_length is {max_length} but model {start.folder} has {longest} positions: "
                f"take fewer, or {more_positions(start.config, max_length, start.folder)}."
            )
        check_pieces(options.context_parallel, partial(blank_classifier, start))
        check_backend_device(start.options.get("backend", "auto"), torch.device(options.device))
        given: dict[str, Any] = vars(options) | in_steps(options, len(data.splits["train"].texts))
        given |= {"task": self.labelled.name, "model": start.name, "max_length": max_length}
        given |= {"attention": start.attention, "options": start.options}
        return FinetuneSettings(**given, fingerprint=start.fingerprint, processes=processes())

    def data(self, settings: FinetuneSettings) -> Data:
        """The texts are read."""
        return Data(self.labelled.folder, self.labelled.data.fingerprint())

    def model(self, settings: FinetuneSettings) -> Any:
        """Make the model, with a new head."""
        data = self.labelled.data
        pairs = data.splits["train"].pairs is not None
        return make_classifier(self.start, classes=data.classes, task=settings.task, pairs=pairs)

    def trainer(self, model: Any, settings: FinetuneSettings) -> RunTrainer[FinetuneSettings]:
        """Encode the texts, and make the trainer."""
        splits, tokenizer = self.labelled.data.splits, self.start.tokenizer
        segments = self.start.segments and takes_segments(model) and splits["train"].pairs is not None
        encoded = {
            name: EncodedSplit(split, tokenizer, max_length=settings.max_length, segments=segments)
            for name, split in splits.items()
        }
        return FinetuneTrainer(model, settings, self.labelled, encoded, tokenizer, self.run)

    def words(self, settings: FinetuneSettings) -> Sequence[str]:
        """The command that the texts were read for."""
        return self.labelled.words


class FinetuneTrainer(RunTrainer[FinetuneSettings]):
    """The trainer of fine-tuning runs; the first metric of the task selects the best checkpoint."""

    def __init__(
        self,
        model: Any,
        settings: FinetuneSettings,
        labelled: LabelledInputs,
        splits: Mapping[str, EncodedSplit],
        tokenizer: PreTrainedTokenizerBase,
        run: RunFolder,
    ):
        self.labelled, self.splits, self.tokenizer = labelled, splits, tokenizer
        self.batch_maker = collator(padding_of(tokenizer), most=settings.max_length)
        task, classes = labelled.task, labelled.data.classes is not None
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
        data, task = self.labelled.data, self.labelled.task
        rows = ResultRows(self.settings, model.config, published=data.published, command=command)
        results: list[Row] = []
        said: list[str] = []
        files: list[Path] = []
        for name, logits in scores.items():
            split = self.splits[name]
            if split.labels is not None:
                values = metrics_of(logits, split.labels, task.metrics, classes=data.classes is not None)
                results += [rows.row(f"{name} {metric}", values[metric], samples=len(split)) for metric in task.metrics]
                said.append(
                    f"{name}: {', '.join(shown(metric, values[metric]) for metric in task.metrics)} ({len(split)})"
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
    values = metrics_of(logits, labels, task.metrics, classes=classes)
    return values | {"selection": values[task.metrics[0]]}
