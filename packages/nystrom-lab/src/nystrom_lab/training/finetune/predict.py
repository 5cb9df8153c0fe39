"""Classify the texts of a file of any size with a fine-tuned model, in order.

Texts are read, encoded and classified a few batches at a time, those of similar length together; so memory does not
depend on their number. One result row is written per text.
"""

import csv
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from nystrom.checks import check_at_least
from nystrom.command_options import taking
from nystrom.progress import Progress
from nystrom.whole_files import check_folder, check_new, whole_file
from nystrom_lab.config import PredictOptions
from nystrom_lab.data.language.labelled.glue import TASKS, LabelledTask, own_task
from nystrom_lab.data.language.labelled.rows import read_texts, spoilt_rows
from nystrom_lab.training.hardware import usable_device, usable_precision

_POOL = 50
_ENDINGS = (".tsv", ".csv", ".jsonl")


@taking(PredictOptions)
def predict(asked: PredictOptions) -> int:
    """Write the label of each text with its probability, or its number, one row per text, in order.

    Returns:
        The number of texts.

    Raises:
        ValueError: A folder, file, column, device or precision that cannot be used, or a file without texts.
    """
    data, to, batch_size = asked.data, asked.to, asked.batch_size
    check_at_least("batch_size", batch_size, 1)
    if asked.threads is not None:
        check_at_least("threads", asked.threads, 1)
    if not data.is_file():
        raise ValueError(f"data is {data}, which is not a file: name the file of the texts.")
    if to is not None and to.suffix.lower() not in _ENDINGS:
        raise ValueError(f"to is {to}; expected a name that ends in {', '.join(_ENDINGS)}.")
    if to is not None:
        check_new(to)
    # Rows on a terminal say themselves how far it is.
    shown = to is None and sys.stdout.isatty()
    device = usable_device(asked.device)
    precision = usable_precision(asked.precision, device)

    import torch

    from nystrom_lab.training.finetune.saved import SavedClassifier

    if asked.threads is not None:
        torch.set_num_threads(asked.threads)
    classifier = SavedClassifier(asked.model, device=device, precision=precision)
    task = _columns(classifier.task, classifier.pairs, asked)
    # A row that cannot be read is found before the first is classified.
    total = sum(1 for _ in read_texts(data, task, []))
    spoilt: list[int] = []
    texts, count = read_texts(data, task, spoilt), 0
    with _opened(to) as file, Progress("predict", total, unit="texts", shown=not shown) as progress:
        write = _writer(file, ".tsv" if to is None else to.suffix.lower(), classifier.classes is not None)
        while pool := list(islice(texts, _POOL * batch_size)):
            for label, probability in classifier.classify(pool, batch_size=batch_size, progress=progress):
                write(count, label, probability)
                count += 1
        if not count:
            raise ValueError(f"data is {data}, which holds no texts: name another file.")
    if spoilt:
        print(f"notice: {spoilt_rows(str(data), spoilt)}.", file=sys.stderr)
    return count


def _columns(name: str, pairs: bool, asked: PredictOptions) -> LabelledTask:
    """The columns of the texts; by default those of the task that the model was fine-tuned on."""
    model, text_field, pair_field = asked.model, asked.text_field, asked.pair_field
    if pairs and pair_field is None and name not in TASKS:
        raise ValueError(f"model {model} classifies pairs of texts: name the column of the second with --pair-field.")
    if not pairs and pair_field is not None:
        raise ValueError(f"pair_field is {pair_field!r}, but model {model} classifies single texts: leave it out.")
    if name in TASKS:
        return TASKS[name].with_fields(text_field=text_field, pair_field=pair_field)
    return own_task(text_field=text_field, pair_field=pair_field)


@contextmanager
def _opened(to: Path | None) -> Iterator[TextIO]:
    """The file to write, or standard output."""
    if to is None:
        yield sys.stdout
        return
    check_folder(to.parent)
    with whole_file(to, new=True) as partial, partial.open("w", encoding="utf-8", newline="") as file:
        yield file


def _writer(file: TextIO, ending: str, classes: bool) -> Any:
    """A function that writes a row: index, label and probability, or index and number."""
    names = ["index", "label", "probability"] if classes else ["index", "prediction"]
    if ending == ".jsonl":

        def write_object(*values: object) -> None:
            file.write(json.dumps(dict(zip(names, values, strict=False)), ensure_ascii=False) + "\n")

        return write_object
    table = csv.writer(file, delimiter="\t" if ending == ".tsv" else ",", lineterminator="\n")
    table.writerow(names)

    def write_row(index: int, label: object, probability: float | None) -> None:
        table.writerow([index, label, f"{probability:.6f}"] if classes else [index, f"{label:.6g}"])

    return write_row
