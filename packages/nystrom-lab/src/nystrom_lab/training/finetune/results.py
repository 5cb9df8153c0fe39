"""Results of a fine-tuning as rows of `nystrom_lab.measure.rows`, and the files of its predictions."""

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nystrom.attention.method_names import sized_name
from nystrom.whole_files import whole_file
from nystrom_lab.data.language.labelled.glue import LabelledTask
from nystrom_lab.measure.rows import Row, cpu_name, new_row
from nystrom_lab.training.finetune.finetune_settings import FinetuneSettings
from nystrom_lab.training.finetune.scores import predicted, probabilities
from nystrom_lab.training.results import wilson

_SHARES = ("accuracy", "F1", "macro F1")


class ResultRows:
    """Makes the rows of one fine-tuning.

    Args:
        settings: Its settings.
        config: The configuration of its model.
        published: Whether its splits are the published ones.
        command: The command that reproduces it.
    """

    def __init__(self, settings: FinetuneSettings, config: Any, *, published: bool, command: str):
        self.settings, self.command = settings, command
        self.method, self.size = sized_name(settings.attention, settings.options)
        if getattr(config, "conv_kernel_size", None) is not None:
            self.method += "+skip"
        self.facts = {
            "model": settings.model,
            "layers": getattr(config, "num_hidden_layers", None),
            "width": getattr(config, "hidden_size", None),
            "heads": getattr(config, "num_attention_heads", None),
            "batch_size": settings.batch_size,
            "learning_rate": settings.learning_rate,
            "splits": None if published else "own",
        }

    def row(self, quantity: str, value: float, unit: str = "", *, samples: int = 1) -> Row:
        """A row; an accuracy has its 95 % interval over `samples` texts."""
        low, high = wilson(value, samples) if quantity.endswith("accuracy") else (None, None)
        settings = self.settings
        return new_row(
            study=f"finetune {settings.task}",
            quantity=quantity,
            method=self.method,
            value=value,
            unit=unit,
            low=low,
            high=high,
            repeats=samples,
            n=settings.max_length,
            m=self.size,
            facts=self.facts,
            dtype=settings.precision,
            seed=settings.seed,
            device=torch.cuda.get_device_name() if settings.device == "cuda" else cpu_name(),
            command=self.command,
        )


def shown(metric: str, value: float) -> str:
    """A metric for printing; shares as percentages."""
    return f"{metric} {value:.1%}" if metric in _SHARES else f"{metric} {value:.3f}"


def write_predictions(
    path: Path, logits: NDArray[Any], classes: Sequence[str] | None, labels: NDArray[Any] | None
) -> None:
    """Write the predictions of a split, one row per text in the order of the file.

    Args:
        path: The tsv file.
        logits: Of each text.
        classes: Names of the classes; None for numbers.
        labels: The true labels; None where there are none.
    """
    guess = predicted(logits, classes=classes is not None)
    header = ["index", "prediction" if classes is None else "label"]
    columns: list[Iterable[object]] = [range(len(guess))]
    if classes is None:
        columns.append(f"{number:.6g}" for number in guess)
    else:
        columns.append(classes[place] for place in guess)
        header.append("probability")
        columns.append(f"{share:.6f}" for share in probabilities(logits).max(axis=-1))
    if labels is not None:
        header.append("true label")
        columns.append(labels.tolist() if classes is None else (classes[place] for place in labels))
    _write(path, header, zip(*columns, strict=True))


def write_submission(path: Path, logits: NDArray[Any], task: LabelledTask) -> None:
    """Write predictions in the format of GLUE's submission site: one line per text with index and prediction.

    Args:
        path: The tsv file, with the name that the site requires.
        logits: Of each text of the test split.
        task: The task.
    """
    guess = predicted(logits, classes=task.classes is not None)
    if task.submitted is None:
        assert task.bounds is not None, "a task of GLUE has words or bounds"
        words: Iterable[str] = (f"{number:.3f}" for number in np.clip(guess, *task.bounds))
    else:
        words = (task.submitted[place] for place in guess)
    _write(path, ["index", "prediction"], enumerate(words))


def _write(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as partial, partial.open("w", encoding="utf-8", newline="") as file:
        # A label is a word of the user's files, which may hold a quote but no tab.
        writer = csv.writer(file, delimiter="\t", lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)
