"""Time and memory of a fine-tuning step with each method, in turn on the same batches of the task."""

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nystrom.clock import seconds
from nystrom.interleaved_timing import in_turns
from nystrom_lab.data.language.labelled.glue import find_labelled
from nystrom_lab.data.language.labelled.splits import read_labelled
from nystrom_lab.measure.peak import peak_bytes
from nystrom_lab.measure.rows import Row, cpu_name, new_row
from nystrom_lab.measure.timing import timed_rows
from nystrom_lab.training.data.batches import TrainingOrder
from nystrom_lab.training.finetune.classifier import find_classifier, make_classifier, takes_segments
from nystrom_lab.training.finetune.encoding import EncodedSplit, collator, padding_of
from nystrom_lab.training.finetune.finetune_settings import BATCH_SIZE
from nystrom_lab.training.scoring import DTYPES

BATCHES, ROUNDS = 3, 5
_CPU = torch.device("cpu")


def step_times(task: str, arguments: Mapping[str, Mapping[str, Any]], *, precision: str) -> Iterable[Row]:
    """Forward and backward passes over the first batches of a run, and their peak memory, on the CPU.

    Each round takes all batches with each method in turn. A row has the median and the quartiles over the rounds;
    ratios are taken within a round.

    Args:
        task: The task.
        arguments: Arguments of `nystrom_lab.training.finetune.finetune.finetune`, by the name of the method; the first
            method is exact attention.
        precision: As in `finetune`.
    """
    first = next(iter(arguments.values()))
    max_length = int(first["max_length"])
    data = read_labelled(tuple(map(Path, first["data"])), find_labelled(task), own=False, kind="auto", val_share=None)
    train = data.splits["train"]
    models, batches = {}, []
    for method, given in arguments.items():
        start = find_classifier(given["model"], attention=given["attention"], options=given["options"])
        model = make_classifier(start, classes=data.classes, task=task, pairs=train.pairs is not None)
        models[method] = model.train()
        if not batches:
            segments = start.segments and takes_segments(model) and train.pairs is not None
            split = EncodedSplit(train, start.tokenizer, max_length=max_length, segments=segments)
            order = list(TrainingOrder(split.lengths, batch_size=BATCH_SIZE, steps=BATCHES, seed=0))
            collate = collator(padding_of(start.tokenizer))
            picked = np.array(order).reshape(BATCHES, BATCH_SIZE)
            batches = [collate([split[place] for place in places]) for places in picked.tolist()]

    def passes(method: str) -> None:
        for batch in batches:
            with torch.autocast("cpu", DTYPES[precision], enabled=precision != "float32"):
                loss = models[method](**batch).loss
            loss.backward()
            models[method].zero_grad()

    calls = {method: partial(passes, method) for method in models}
    times = in_turns({method: partial(seconds, call, _CPU) for method, call in calls.items()}, ROUNDS)
    exact, *_ = ([value / BATCHES for value in taken] for taken in times.values())
    tokens = sum(batch["input_ids"].numel() for batch in batches)
    facts = {"model": Path(first["model"]).name, "b": BATCH_SIZE, "batches": BATCHES, "tokens": tokens}
    shared = {"device": cpu_name(), "dtype": precision, "facts": facts, "n": max_length, "seed": 0}
    for method, measured in times.items():
        memory, taken = peak_bytes(calls[method], _CPU) / 1e6, [value / BATCHES for value in measured]
        yield from timed_rows(method, taken, exact, ("step time", "step time / exact"), **shared)
        yield new_row(study="", quantity="step memory", method=method, value=memory, unit="MB", **shared)
