"""The metrics of GLUE are those of scikit-learn and scipy."""

import numpy as np
import pytest
import scipy.special
import scipy.stats
import sklearn.metrics

from nystrom_lab.training.finetune.results import probabilities, scores

RNG = np.random.default_rng(0)


def test_metrics_of_classes_are_those_of_scikit_learn():
    logits, labels = RNG.normal(size=(60, 2)), RNG.integers(0, 2, size=60)
    guess = logits.argmax(-1)
    found = scores(logits, labels, ("accuracy", "F1", "macro F1", "Matthews correlation"), classes=True)
    wanted = {
        "accuracy": sklearn.metrics.accuracy_score(labels, guess),
        "F1": sklearn.metrics.f1_score(labels, guess),
        "macro F1": sklearn.metrics.f1_score(labels, guess, average="macro"),
        "Matthews correlation": sklearn.metrics.matthews_corrcoef(labels, guess),
        "loss": sklearn.metrics.log_loss(labels, scipy.special.softmax(logits, axis=-1)),
    }
    assert found == pytest.approx(wanted)
    assert probabilities(logits) == pytest.approx(scipy.special.softmax(logits, axis=-1))


def test_metrics_of_numbers_are_those_of_scipy():
    guess = RNG.normal(size=(40, 1))
    # Ties among the labels, as in STS-B.
    labels = np.round(guess[:, 0] + RNG.normal(size=40), 0)
    metrics = ("correlation", "Pearson correlation", "Spearman correlation", "root mean squared error")
    found = scores(guess, labels, metrics, classes=False)
    pearson = scipy.stats.pearsonr(labels, guess[:, 0])[0]
    spearman = scipy.stats.spearmanr(labels, guess[:, 0])[0]
    error = sklearn.metrics.mean_squared_error(labels, guess[:, 0])
    assert found == pytest.approx(
        dict(zip((*metrics, "loss"), ((pearson + spearman) / 2, pearson, spearman, error**0.5, error), strict=True))
    )


def test_constants_have_no_correlation_and_no_positives_no_f1():
    assert scores(np.ones((5, 1)), np.arange(5.0), ("correlation",), classes=False)["correlation"] == 0
    logits = np.tile([1.0, 0.0], (5, 1))
    assert scores(logits, np.zeros(5, dtype=int), ("F1", "Matthews correlation"), classes=True)["F1"] == 0
