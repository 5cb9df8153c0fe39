r"""Results of a fine-tuning: metrics, rows of `nystrom_lab.measure.rows`, and the files of its predictions.

The metrics are those of GLUE, by scikit-learn and scipy. A correlation with constants, which is undefined, counts as 0:
nothing was learned. The loss is the mean cross entropy, or the mean squared error of numbers.
"""

import csv
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from nystrom.attention.method_names import sized_name
from nystrom.whole_files import whole_file
from nystrom_lab.data.language.labelled.glue import LabelledTask, Metric
from nystrom_lab.measure.rows import Row
from nystrom_lab.training.finetune.finetune_settings import FinetuneSettings
from nystrom_lab.training.hardware import device_name
from nystrom_lab.training.results import wilson

Numbers = NDArray[Any]


def predicted(logits: Numbers, *, classes: bool) -> Numbers:
    """The class with the largest logit, or the number."""
    return logits.argmax(axis=-1) if classes else logits.reshape(len(logits)).astype(np.float64)


def scores(logits: Numbers, labels: Numbers, metrics: Sequence[Metric], *, classes: bool) -> dict[str, float]:
    """The metrics by name, and the loss.

    Args:
        logits: For each text one logit for each class, or one number.
    """
    guess, truth = predicted(logits, classes=classes), np.asarray(labels)
    values = {metric: float(_METRICS[metric](truth, guess)) for metric in metrics}
    return values | {"loss": _cross_entropy(logits, truth) if classes else float(np.mean((guess - truth) ** 2))}


def probabilities(logits: Numbers) -> Numbers:
    """The softmax of logits, in float64."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    weights = np.exp(shifted)
    return weights / weights.sum(axis=-1, keepdims=True)


def _cross_entropy(logits: Numbers, truth: Numbers) -> float:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    chosen = np.take_along_axis(shifted, truth[:, None].astype(np.int64), axis=-1)[:, 0]
    return float(np.mean(np.log(np.exp(shifted).sum(axis=-1)) - chosen))


def _accuracy(truth: Numbers, guess: Numbers) -> float:
    from sklearn.metrics import accuracy_score

    return accuracy_score(truth, guess)


def _f1(truth: Numbers, guess: Numbers, average: Literal["binary", "macro"] = "binary") -> float:
    from sklearn.metrics import f1_score

    # F1 is 0 without a true and without a predicted positive.
    return float(f1_score(truth, guess, average=average, zero_division=0.0))  # pyright: ignore[reportArgumentType]


def _matthews(truth: Numbers, guess: Numbers) -> float:
    from sklearn.metrics import matthews_corrcoef

    # Undefined where all is one class.
    return 0.0 if _constant(truth) or _constant(guess) else float(matthews_corrcoef(truth, guess))


def _pearson(truth: Numbers, guess: Numbers) -> float:
    return 0.0 if _constant(truth, guess) else float(np.corrcoef(truth, guess)[0, 1])


def _spearman(truth: Numbers, guess: Numbers) -> float:
    from scipy.stats import rankdata

    return _pearson(rankdata(truth), rankdata(guess))


def _correlation(truth: Numbers, guess: Numbers) -> float:
    return (_pearson(truth, guess) + _spearman(truth, guess)) / 2


def _root_error(truth: Numbers, guess: Numbers) -> float:
    return float(np.sqrt(np.mean((guess - truth) ** 2)))


def _constant(*numbers: Numbers) -> bool:
    return any(np.ptp(values) <= 1e-12 * max(1.0, float(np.abs(values).max())) for values in numbers)


_METRICS: dict[Metric, Callable[[Numbers, Numbers], float]] = {
    "accuracy": _accuracy,
    "F1": _f1,
    "macro F1": partial(_f1, average="macro"),
    "Matthews correlation": _matthews,
    "correlation": _correlation,
    "Pearson correlation": _pearson,
    "Spearman correlation": _spearman,
    "root mean squared error": _root_error,
}


_SHARES = ("accuracy", "F1", "macro F1")


class ResultRows:
    """Makes the rows of one fine-tuning.

    Args:
        published: Whether its splits are the published ones.
    """

    def __init__(self, settings: FinetuneSettings, config: Any, *, published: bool, command: str):
        self.settings, self.command = settings, command
        self.method, self.size = sized_name(settings.attention, settings.options)
        if getattr(config, "conv_kernel_size", None) is not None:
            self.method += "+skip"
        self.facts = {
            "model": settings.model,
            "fingerprint": settings.fingerprint,
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
        return Row(
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
            device=device_name(settings.device),
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
