r"""The metrics of GLUE, by scikit-learn and scipy, and the loss, from logits and labels.

A correlation with constants, which is undefined, counts as 0: nothing was learned. The loss is the mean cross entropy,
or the mean squared error of numbers.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from nystrom_lab.data.language.labelled.glue import Metric

Numbers = NDArray[Any]


def predicted(logits: Numbers, *, classes: bool) -> Numbers:
    """The class with the largest logit, or the number."""
    return logits.argmax(axis=-1) if classes else logits.reshape(len(logits)).astype(np.float64)


def scores(logits: Numbers, labels: Numbers, metrics: Sequence[Metric], *, classes: bool) -> dict[str, float]:
    """The metrics by name, and the loss.

    Args:
        logits: Of each text, one for each class, or one number.
        labels: The class, or the number.
        metrics: Names of metrics.
        classes: Whether the labels are classes.
    """
    guess, truth = predicted(logits, classes=classes), np.asarray(labels)
    found = {metric: float(_METRICS[metric](truth, guess)) for metric in metrics}
    return found | {"loss": _cross_entropy(logits, truth) if classes else float(np.mean((guess - truth) ** 2))}


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

    # Without a true and without a predicted positive it is 0.
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
