"""Scores of a model that was trained with exact attention, with another method in its place."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nystrom.attention.method_names import read_method
from nystrom_lab.data.language.labelled.glue import find_labelled
from nystrom_lab.data.language.labelled.splits import read_labelled
from nystrom_lab.measure.rows import Row
from nystrom_lab.training.finetune.classifier import find_classifier, make_classifier, takes_segments
from nystrom_lab.training.finetune.encoding import EncodedSplit, collator, padding_of
from nystrom_lab.training.finetune.finetune_settings import BATCH_SIZE, MAX_LENGTH
from nystrom_lab.training.finetune.inference import logits_of
from nystrom_lab.training.finetune.results import predicted, scores
from nystrom_lab.training.results import wilson


def swapped_rows(
    best: Path, task: str, data: Path, methods: Sequence[str], *, name: str, precision: str
) -> Iterable[Row]:
    """Score a model with each method in turn, without any training.

    The rows hold the task's metrics on the test texts, or on the validation texts where the test labels are not
    published, and the share of predictions that differ from those of the first method. The model's own method is the
    first.
    """
    facts, labelled = (
        find_labelled(task),
        read_labelled((data,), find_labelled(task), own=False, kind="auto", val_share=None),
    )
    which = "test" if "test" in labelled.splits else "validation"
    texts, first = labelled.splits[which], None
    split: EncodedSplit | None = None
    for method in methods:
        attention, options = read_method(method)
        start = find_classifier(str(best), attention=attention, options=options)
        model = make_classifier(start, classes=labelled.classes, task=task, pairs=texts.pairs is not None)
        if split is None:
            segments = start.segments and takes_segments(model) and texts.pairs is not None
            split = EncodedSplit(texts, start.tokenizer, max_length=MAX_LENGTH, segments=segments)
        collate = collator(padding_of(start.tokenizer))
        logits = logits_of(model, split, collate, batch_size=BATCH_SIZE, device="cpu", precision=precision)
        guess = predicted(logits, classes=labelled.classes is not None)
        first = guess if first is None else first
        shared: dict[str, Any] = {
            "method": method, "n": MAX_LENGTH, "repeats": len(split),
            "facts": {"model": name, "splits": "published" if labelled.published else "own"},
            "dtype": precision, "seed": 0,
        }  # fmt: skip
        assert split.labels is not None, "the test texts have labels, and validation always has"
        results: Mapping[str, float] = scores(logits, split.labels, facts.metrics, classes=labelled.classes is not None)
        for metric in facts.metrics:
            low, high = wilson(results[metric], len(split)) if metric == "accuracy" else (None, None)
            yield Row(quantity=f"{which} {metric}", value=results[metric], low=low, high=high, **shared)
        changed = float(np.mean(guess != first))
        yield Row(quantity=f"{which} predictions that change", value=changed, **shared)
