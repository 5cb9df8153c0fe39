"""A fine-tuned model with its tokenizer, for a stream of texts."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from nystrom.integrations.bert_names import positions_of
from nystrom.progress import Progress
from nystrom_lab.data.language.labelled.splits import TextSplit
from nystrom_lab.data.language.tokenizer import load_tokenizer
from nystrom_lab.training.finetune.classifier import check_vocabulary, load_classifier, takes_segments
from nystrom_lab.training.finetune.encoding import EncodedSplit, collator, padding_of
from nystrom_lab.training.finetune.finetune_settings import MAX_LENGTH
from nystrom_lab.training.finetune.inference import logits_of
from nystrom_lab.training.finetune.scores import predicted, probabilities
from nystrom_lab.training.run.progress import no_file_bars

# A tokenizer without a length has a number beyond this.
_NO_LENGTH = 10**18


class SavedClassifier:
    """A model from a folder, with the attention that the folder names.

    Args:
        folder: A model saved by `nystrom finetune`, or any text classifier.
        device: "cpu" or "cuda".
        precision: "float32", "bfloat16" or "float16".

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
            batch_size: Texts at a time.
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
