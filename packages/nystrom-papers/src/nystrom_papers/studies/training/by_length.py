"""Accuracy of fine-tuned models on short and on long texts, from the predictions that their runs wrote."""

import csv
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nystrom_lab.measure.rows import Row
from nystrom_lab.training.results import wilson

# Tokens of the longest text in each part. The last part holds the texts that fill the model, most of which were cut.
BOUNDS = (128, 256, 511, 512)


def rows_by_length(
    predictions: Path, lengths: NDArray[Any], *, split: str, method: str, precision: str, facts: Mapping[str, object]
) -> Iterable[Row]:
    """The accuracy on the texts of each part, with its interval; parts without texts have no row.

    The lengths are cut to the longest text that the model takes.

    Raises:
        ValueError: The predictions are of other texts.
    """
    with predictions.open(encoding="utf-8", newline="") as file:
        right = np.array([row["label"] == row["true label"] for row in csv.DictReader(file, delimiter="\t")])
    if len(right) != len(lengths):
        raise ValueError(
            f"{predictions} has {len(right)} texts, but the data have {len(lengths)}: it is of other data; train the "
            "run again in another folder."
        )
    shortest = 1
    for bound in BOUNDS:
        those = right[(lengths >= shortest) & (lengths <= bound)]
        if len(those):
            accuracy = float(those.mean())
            low, high = wilson(accuracy, len(those))
            yield Row(
                quantity=f"{split} accuracy of texts of {shortest} to {bound} tokens", method=method, value=accuracy,
                low=low, high=high, repeats=len(those), n=bound, dtype=precision, facts=facts, seed=0,
            )  # fmt: skip
        shortest = bound + 1
