"""Instances as text, with the original token behind each mask."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from nystrom_lab.data.language.mlm_sop.dataset import IGNORED, MlmSop

ORDER = ("in order", "swapped")


def show_instances(data: MlmSop, numbers: Sequence[int], *, most: int) -> Iterator[str]:
    """Print instances of the first epoch.

    A chosen token is shown as {model input=original token}.

    Args:
        data: The instances.
        numbers: Which of them.
        most: Maximum number of tokens to show of each.

    Yields:
        One instance as text.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(data.folder) / "tokenizer.json"))
    for number in numbers:
        sample, place = data[number], data.stretches(np.array([number]))
        ids, labels = sample["input_ids"].tolist(), sample["labels"].tolist()
        words = []
        for token, label in zip(ids[:most], labels[:most], strict=True):
            shown = tokenizer.id_to_token(token)
            words.append(shown if label == IGNORED else f"{{{shown}={tokenizer.id_to_token(label)}}}")
        chosen = sum(label != IGNORED for label in labels)
        head = (
            f"{data.split} {number}: document {place.document[0]}, tokens {place.start[0]} to {place.stop[0] - 1};"
            f" segments {ORDER[sample['sentence_order_label']]}, {chosen} of {len(ids)} tokens to predict"
        )
        yield f"{head}\n{' '.join(words)}{' ...' if len(ids) > most else ''}\n"
