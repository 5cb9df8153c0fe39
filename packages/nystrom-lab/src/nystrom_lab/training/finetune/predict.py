"""Classify the texts of a file of any size with a fine-tuned model, in order.

Texts are read, encoded and classified a few batches at a time, those of similar length together; so memory does not
depend on their number. One result row is written per text.
"""

import csv
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

import torch

from nystrom.checks import check_at_least
from nystrom.integrations.bert_names import positions_of
from nystrom.progress import Progress
from nystrom.whole_files import check_folder, check_new, whole_file
from nystrom_lab.config import PredictOptions
from nystrom_lab.data.language.labelled.glue import TASKS, LabelledTask, own_task
from nystrom_lab.data.language.labelled.rows import read_texts, spoilt_rows
from nystrom_lab.data.language.labelled.splits import TextSplit
from nystrom_lab.data.language.tokenizer import load_tokenizer
from nystrom_lab.training.finetune.classifier import check_vocabulary, load_classifier, takes_segments
from nystrom_lab.training.finetune.encoding import EncodedSplit, collator, padding_of
from nystrom_lab.training.finetune.finetune_settings import MAX_LENGTH
from nystrom_lab.training.finetune.inference import logits_of
from nystrom_lab.training.finetune.results import predicted, probabilities
from nystrom_lab.training.hardware import usable_device, usable_precision
from nystrom_lab.training.run_progress import no_file_bars

# A tokenizer without a length has a number beyond this.
_NO_LENGTH = 10**18


class SavedClassifier:
    """A model from a folder, with the attention that the folder names.

    Args:
        folder: A model saved by `nystrom finetune`, or any text classifier.

    Attributes:
        task: The task that it was fine-tuned on; "" if unknown.
        pairs: Whether it classifies pairs of texts.
        classes: Names of the classes; None for numbers.

    Raises:
        ValueError: The folder holds no classifier, a broken one, or no matching tokenizer.
    """

    def __init__(self, folder: str | Path, *, device: str, precision: str):
        path = Path(folder)
        if not path.is_dir():
            raise ValueError(f"model is {folder}, which is not a folder: name a fine-tuned model, such as RUN/best.")
        with no_file_bars():
            self.model = load_classifier(path)
        self.tokenizer = load_tokenizer(path)
        config = self.model.config
        check_vocabulary(path, self.tokenizer, config.vocab_size)
        self.device, self.precision = device, precision
        self.task = getattr(config, "task", None) or getattr(config, "finetuning_task", None) or ""
        self.pairs = bool(getattr(config, "text_pairs", False))
        numbers = config.problem_type == "regression" or config.num_labels == 1
        self.classes = None if numbers else [str(name) for _, name in sorted((config.id2label or {}).items())]
        # A fine-tuning keeps its length there.
        kept = int(self.tokenizer.model_max_length)
        self.max_length = min(kept, positions_of(config) or (kept if kept < _NO_LENGTH else MAX_LENGTH))
        self.segments = self.pairs and (getattr(config, "type_vocab_size", 0) or 0) > 1 and takes_segments(self.model)

    def classify(
        self, texts: Sequence[tuple[str, ...]], *, batch_size: int, progress: Progress | None = None
    ) -> Iterator[tuple[str | float, float | None]]:
        """The label of each text, or pair, and its probability; or a number, and None.

        Args:
            texts: Texts, or pairs of them, as tuples.
            progress: Counts the texts; None for one of these alone.
        """
        columns = list(zip(*texts, strict=True))
        split = TextSplit(list(columns[0]), list(columns[1]) if self.pairs else None, None)
        encoded = EncodedSplit(split, self.tokenizer, max_length=self.max_length, segments=self.segments)
        collate = collator(padding_of(self.tokenizer), most=self.max_length)
        logits = logits_of(
            self.model, encoded, collate, batch_size=batch_size, device=self.device, precision=self.precision,
            progress=progress,
        )  # fmt: skip
        guess = predicted(logits, classes=self.classes is not None)
        if self.classes is None:
            yield from ((float(number), None) for number in guess)
        else:
            shares = probabilities(logits).max(axis=-1)
            yield from ((self.classes[place], float(share)) for place, share in zip(guess, shares, strict=True))


_POOL = 50
_ENDINGS = (".tsv", ".csv", ".jsonl")


def predict(options: PredictOptions) -> int:
    """Write the label of each text with its probability, or its number, one row per text, in order.

    Returns:
        The number of texts.

    Raises:
        ValueError: A folder, file, column, device or precision that cannot be used, or a file without texts.
    """
    data, to, batch_size = options.data, options.to, options.batch_size
    check_at_least("batch_size", batch_size, 1)
    if options.threads is not None:
        check_at_least("threads", options.threads, 1)
    if not data.is_file():
        raise ValueError(f"data is {data}, which is not a file: name the file of the texts.")
    if to is not None and to.suffix.lower() not in _ENDINGS:
        raise ValueError(f"to is {to}; expected a name that ends in {', '.join(_ENDINGS)}.")
    if to is not None:
        check_new(to)
    # Rows on a terminal say themselves how far it is.
    shown = to is None and sys.stdout.isatty()
    device = usable_device(options.device)
    precision = usable_precision(options.precision, device)

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    classifier = SavedClassifier(options.model, device=device, precision=precision)
    task = _columns(classifier.task, classifier.pairs, options)
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


def _columns(name: str, pairs: bool, options: PredictOptions) -> LabelledTask:
    """The columns of the texts; by default those of the task that the model was fine-tuned on."""
    model, text_field, pair_field = options.model, options.text_field, options.pair_field
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
