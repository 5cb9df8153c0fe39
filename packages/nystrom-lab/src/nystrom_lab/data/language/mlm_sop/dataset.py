r"""Instances of masked words and sentence order, drawn on demand from prepared documents.

An instance is `[CLS] A [SEP] B [SEP]`: two consecutive segments of a document, swapped in half of the instances (label
1), of `length` tokens in all at most. 15 % of the tokens are chosen, min(80, 15 %) at length 512; of those 80 % become
[MASK], 10 % another word and 10 % stay. Special tokens are never chosen and never put in a word's place.

A document of no more than $r = \mathrm{length} - 3$ tokens is one instance. A longer one, of L tokens, makes
$\lceil L / r \rceil$: every token is in one of them, and where they meet is drawn anew in each epoch. A tenth of the
instances is short: a random stretch of 2 to r tokens. The first segment ends at the end of a sentence, if there is one
inside the instance, and anywhere otherwise. Nothing needs to be truncated, since instances are cut to fit.

The content of an instance depends only on the seed, the epoch and its number, not on the number of workers and
processes or the order of requests. Instance i of epoch e has the number e * len(data) + i, so a sampler alone defines
the epochs, and a resumed run gets the same instances as an uninterrupted one.

Source: Xiong et al. (2021), arXiv:2102.03902, section 5.1; Devlin et al. (2019); Lan et al. (2019). Departs from the
authors' code, which gathers whole sentences up to the length, truncates what is too long at random ends, and takes
int(15 %) of the tokens, perhaps none.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nystrom.checks import check_at_least
from nystrom_lab.data.language.mlm_sop.draws import Keys, below, bits, keys, uniform
from nystrom_lab.data.language.mlm_sop.task import SHORTEST, TASK
from nystrom_lab.data.language.mlm_sop.vocabulary import Vocabulary, vocabulary_of
from nystrom_lab.data.store.prepared_folder import verify
from nystrom_lab.data.store.token_files import HEADER, damaged, open_split, read_header

if TYPE_CHECKING:
    from torch import Tensor

SPECIAL, LEAST = 3, 2
SHORT, MASKED, AS_MASK, AS_WORD = 0.1, 0.15, 0.8, 0.9
MOST_MASKED = 80 / 512
IGNORED = -100
# Places in the draws of an instance.
IS_SHORT, TARGET, START, SEGMENTS, SWAPPED, WORDS = range(6)


class Stretches(NamedTuple):
    """Places of instances: document, first token, the token after the last, and the key of everything else."""

    document: NDArray[np.int64]
    start: NDArray[np.int64]
    stop: NDArray[np.int64]
    key: Keys


class MlmSop:
    """One split of prepared documents as instances; a torch data set with batched fetch.

    `data[i]` and each of `data[[i, j]]` (`__getitems__`) is a dictionary of

        input_ids             int64 (n,), the tokens with their masks
        token_type_ids        int64 (n,), 0 up to the first [SEP] and 1 after it
        labels                int64 (n,), the word behind a token that was chosen, -100 for all others
        sentence_order_label  0 for segments in order, 1 for swapped ones

    and `collate` turns them into a batch for `EncoderForPreTraining`. Numbers from `len(data)` on are instances of
    later epochs. A copy for another process opens the files again.

        order = (e * len(data) + i for e in range(epochs) for i in permutation(e))
        loader = DataLoader(data, batch_size=32, sampler=order, collate_fn=data.collate, num_workers=2)

    Args:
        folder: A folder made by `prepare_mlm_sop`.
        split: train, or val for the held-out documents.
        length: Maximum number of tokens per instance; any length works. Default: the length that the folder was
            prepared for.
        seed: Decides all draws.

    Attributes:
        length: Maximum number of tokens per instance.
        vocabulary: Special tokens and the like; `vocabulary.size` is a model's vocab_size.
        documents: Number of documents.
        tokens: Number of their tokens.

    Raises:
        ValueError: The folder is not prepared, damaged or of another task, `split` is unknown or empty, or a number is
            out of range.
    """

    task = TASK

    def __init__(self, folder: Path, split: str, *, length: int | None = None, seed: int = 0):
        self.folder, self.split, self.seed = Path(folder), split, seed
        samples = open_split(self.folder, split, task=TASK)
        header = read_header(self.folder, TASK)
        vocabulary = vocabulary_of(header.get("facts", {}).get("vocabulary", {}))
        prepared = header["settings"].get("length")
        if vocabulary is None or type(prepared) is not int:
            raise damaged(self.folder / HEADER, "describes no vocabulary", TASK)
        self.length = prepared if length is None else length
        check_at_least("length", self.length, SHORTEST)
        check_at_least("seed", seed, 0)
        if not samples.labels.size:
            raise ValueError(f"{split} of {self.folder} is empty: documents are in train, those held out in val.")
        self.vocabulary: Vocabulary = vocabulary
        self._tokens, self._offsets = samples.tokens, samples.offsets
        self.documents, self.tokens = samples.labels.size, samples.tokens.size
        self._room = self.length - SPECIAL
        counts = -(-np.diff(samples.offsets) // self._room)
        self._first = np.concatenate([np.zeros(1, dtype=np.int64), counts.cumsum()])
        self._is_word = ~vocabulary.table(vocabulary.no_words)
        self._words = np.flatnonzero(self._is_word)
        self._ends = vocabulary.table(vocabulary.sentence_ends)

    def __len__(self) -> int:
        """Instances of an epoch."""
        return int(self._first[-1])

    def __getitem__(self, number: int) -> dict[str, Any]:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[dict[str, Any]]:
        if numbers and min(numbers) < 0:
            raise IndexError(f"number {min(numbers)} is below 0: instance i of epoch e has number e * len + i.")
        stretches = self.stretches(np.asarray(numbers, dtype=np.int64))
        first = self._offsets[stretches.document]
        places = zip((first + stretches.start).tolist(), (first + stretches.stop).tolist(), strict=True)
        return [self._instance(start, stop, stretches.key[i : i + 1]) for i, (start, stop) in enumerate(places)]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Go through the first epoch."""
        return (self[number] for number in range(len(self)))

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.folder, self.split, self.length, self.seed)

    def lengths(self, epoch: int = 0) -> NDArray[np.int64]:
        """The number of tokens of each instance of an epoch, including special ones."""
        _, start, stop, _ = self.stretches(np.arange(len(self)) + epoch * len(self))
        return stop - start + SPECIAL

    def stretches(self, numbers: NDArray[np.int64]) -> Stretches:
        """Locate the tokens of instances."""
        epoch, number = np.divmod(numbers, len(self))
        document = np.searchsorted(self._first, number, side="right") - 1
        part, parts = number - self._first[document], self._first[document + 1] - self._first[document]
        tokens = self._offsets[document + 1] - self._offsets[document]
        room, rest = self._room, tokens - (parts - 1) * self._room
        # The first instance of a document takes between `rest` and `room` tokens, the last one what is left.
        low, high = np.maximum(rest, LEAST), np.minimum(room, rest + room - LEAST)
        first = low + below(keys(self.seed, epoch, document), 0, high - low + 1)
        first = np.where(parts == 1, tokens, first)
        start = np.where(part == 0, 0, first + (part - 1) * room)
        size = np.where(part == 0, first, np.minimum(room, tokens - start))
        key = keys(self.seed, epoch, number, 1)
        target = LEAST + below(key, TARGET, room - LEAST + 1)
        target = np.where(uniform(key, IS_SHORT) < SHORT, np.minimum(target, size), size)
        start = start + below(key, START, size - target + 1)
        return Stretches(document, start, start + target, key)

    def collate(self, samples: Sequence[Mapping[str, Any]], *, length: int | None = None) -> dict[str, "Tensor"]:
        """Pad instances at their end, to the longest or to a given length, as a batch for `EncoderForPreTraining`.

        Returns:
            `input_ids`, `token_type_ids` and `labels` (b, n), int64, the labels padded with -100; `attention_mask`
            (b, n), true where a token is real; `sentence_order_label` (b,).

        Raises:
            ValueError: An instance is longer than `length`.
        """
        import torch

        sizes = np.array([len(sample["input_ids"]) for sample in samples])
        longest = int(sizes.max())
        if length is not None and length < longest:
            raise ValueError(
                f"length is {length}, and an instance has {longest} tokens: draw shorter ones, or pad to more."
            )
        real = np.arange(longest if length is None else length) < sizes[:, None]
        batch = {"attention_mask": torch.from_numpy(real)}
        fillers = {"input_ids": self.vocabulary.pad_token_id, "token_type_ids": 0, "labels": IGNORED}
        for name, filler in fillers.items():
            padded = np.full(real.shape, filler, dtype=np.int64)
            padded[real] = np.concatenate([sample[name] for sample in samples])
            batch[name] = torch.from_numpy(padded)
        batch["sentence_order_label"] = torch.tensor([sample["sentence_order_label"] for sample in samples])
        return batch

    def verify(self) -> None:
        """Read all files of the data set, and raise ValueError that names one if its checksum differs."""
        verify(self.folder, task=TASK)

    def _instance(self, start: int, stop: int, key: Keys) -> dict[str, Any]:
        words = self._tokens[start:stop].astype(np.int64)
        cut = self._cut(words, key)
        swapped = bool(uniform(key, SWAPPED)[0] < 0.5)
        before = words.size - cut if swapped else cut
        ids = np.empty(words.size + SPECIAL, dtype=np.int64)
        ids[0], ids[before + 1], ids[-1] = (self.vocabulary.cls_token_id, *[self.vocabulary.sep_token_id] * 2)
        ids[1 : before + 1], ids[before + 2 : -1] = (
            (words[cut:], words[:cut]) if swapped else (words[:cut], words[cut:])
        )
        segments = np.zeros(ids.size, dtype=np.int64)
        segments[before + 2 :] = 1
        masked, labels = self._mask(ids, key)
        return {
            "input_ids": masked,
            "token_type_ids": segments,
            "labels": labels,
            "sentence_order_label": int(swapped),
        }

    def _cut(self, words: NDArray[np.int64], key: Keys) -> int:
        """Draw where the second segment begins."""
        ends = np.flatnonzero(self._ends[words[:-1]])
        if ends.size:
            return int(ends[below(key, SEGMENTS, ends.size)[0]]) + 1
        return int(below(key, SEGMENTS, words.size - 1)[0]) + 1

    def _mask(self, ids: NDArray[np.int64], key: Keys) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Mask words; give the tokens with masks, and the labels."""
        labels = np.full(ids.size, IGNORED, dtype=np.int64)
        places = np.flatnonzero(self._is_word[ids])
        wanted = min(round(self.length * MOST_MASKED), max(1, round(places.size * MASKED)), places.size)
        if not wanted:
            return ids, labels
        # Three draws for each place: whether it is chosen, what becomes of it, and which word it may become.
        ranks = bits(key, WORDS + 3 * places)
        places = places[np.argpartition(ranks, wanted - 1)[:wanted]]
        labels[places] = ids[places]
        action = uniform(key, WORDS + 3 * places + 1)
        others = self._words[below(key, WORDS + 3 * places + 2, self._words.size)]
        masks = np.where(action < AS_MASK, self.vocabulary.mask_token_id, others)
        masked = ids.copy()
        masked[places] = np.where(action < AS_WORD, masks, ids[places])
        return masked, labels


def _reopen(folder: Path, split: str, length: int, seed: int) -> MlmSop:
    return MlmSop(folder, split, length=length, seed=seed)
