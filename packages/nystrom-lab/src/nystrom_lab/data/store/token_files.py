"""Token sequences on disk, described by `dataset.json` and read through memory maps.

    SPLIT_tokens.npy     the tokens of all samples of the split, end to end (unsigned integers)
    SPLIT_offsets.npy    int64, one more than samples: sample i holds tokens[offsets[i]:offsets[i + 1]]
    SPLIT_labels.npy     uint8, one per sample
    SPLIT_members.npy    int64, samples x k, only where a sample is made of k sequences: which ones

with SPLIT one of train, val, test. With members the offsets are those of the sequences, and one that many samples share
is stored once. `open_split` checks all but the tokens themselves; `prepared_folder.verify` reads everything.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from nystrom_lab.data.store.arrays import open_array, write_array
from nystrom_lab.data.store.header import SPLITS, damaged, read_header

TOKENS = (np.uint8, np.uint16, np.uint32)


class TokenSamples(NamedTuple):
    """Token sequences end to end: sequence i is `tokens[offsets[i]:offsets[i + 1]]`.

    Sample i is sequence i, or the sequences that `open_members` gives; its class is `labels[i]`.
    """

    tokens: NDArray[np.unsignedinteger]
    offsets: NDArray[np.int64]
    labels: NDArray[np.uint8]


def gather(sequences: Sequence[NDArray[np.unsignedinteger]], labels: Sequence[int]) -> TokenSamples:
    """Concatenate sequences."""
    lengths = np.array([0, *map(len, sequences)], dtype=np.int64)
    tokens = np.concatenate(sequences) if sequences else np.zeros(0, dtype=np.uint8)
    return TokenSamples(tokens, lengths.cumsum(), np.array(labels, dtype=np.uint8))


def write_split(folder: Path, split: str, samples: TokenSamples, members: NDArray[np.int64] | None = None) -> None:
    """Write one split into a folder of `new_folder`."""
    tokens, offsets, labels = samples
    write_pieces(folder, split, [tokens], offsets, labels, members, dtype=tokens.dtype)


def write_pieces(
    folder: Path,
    split: str,
    tokens: Iterable[NDArray[Any]],
    offsets: NDArray[np.int64],
    labels: NDArray[np.uint8],
    members: NDArray[np.int64] | None = None,
    *,
    dtype: DTypeLike = np.uint8,
) -> None:
    """Write one split whose tokens come in pieces.

    Args:
        folder: Folder of `new_folder`.
        split: One of train, val and test.
        tokens: Pieces of the tokens of all sequences; they may come while they are written.
        offsets: Where each sequence begins, and the end of the last.
        labels: Class of each sample.
        members: Sequences of each sample, if it has several.
        dtype: Type of the tokens.
    """
    write_array(folder / f"{split}_tokens.npy", dtype, (int(offsets[-1]),), tokens)
    write_array(folder / f"{split}_offsets.npy", np.int64, offsets.shape, [offsets])
    write_array(folder / f"{split}_labels.npy", np.uint8, labels.shape, [labels])
    if members is not None:
        write_array(folder / f"{split}_members.npy", np.int64, members.shape, [members])


def describe_splits(folder: Path) -> dict[str, dict[str, Any]]:
    """Count the written samples and tokens, for the header."""
    parts = {
        part: {split: np.load(path, mmap_mode="r") for split in SPLITS if (path := _path(folder, split, part)).exists()}
        for part in ("tokens", "offsets", "labels", "members")
    }
    classes = max(int(labels.max(initial=0)) for labels in parts["labels"].values()) + 1
    described = {}
    for split in SPLITS:
        labels = parts["labels"][split]
        counts = np.bincount(labels, minlength=classes)
        described[split] = {
            "samples": labels.size,
            "tokens": parts["tokens"][split].size,
            "class_counts": counts.tolist(),
            "class_shares": (counts / max(labels.size, 1)).round(6).tolist(),
        }
        if (members := parts["members"].get(split)) is not None:
            sequences = parts["offsets"][split].size - 1
            described[split] |= {"sequences": sequences, "sequences_per_sample": members.shape[1]}
    return described


def open_split(folder: Path, split: str, *, task: str) -> TokenSamples:
    """Open one split; the tokens stay on disk.

    Raises:
        ValueError: `split` is unknown, or the folder is not prepared, damaged, or of another task.
    """
    opened = _Opened(folder, split, task)
    counts = opened.counts
    tokens = opened.array("tokens", TOKENS, (counts["tokens"],))
    offsets = np.array(opened.array("offsets", [np.int64], (counts.get("sequences", counts["samples"]) + 1,)))
    labels = np.array(opened.array("labels", [np.uint8], (counts["samples"],)))
    if offsets[0] != 0 or offsets[-1] != tokens.size or (np.diff(offsets) < 0).any():
        raise opened.damaged("offsets", f"does not rise from 0 to {tokens.size}")
    wanted = counts["class_counts"]
    if (came := np.bincount(labels, minlength=len(wanted)).tolist()) != wanted:
        raise opened.damaged("labels", f"has classes of {came} samples instead of {wanted}")
    return TokenSamples(tokens, offsets, labels)


def open_members(folder: Path, split: str, *, task: str) -> NDArray[np.int64]:
    """Open the sequences that the samples of a split are made of.

    Raises:
        ValueError: `split` is unknown, or the folder is not prepared, damaged, or of another task.
    """
    opened = _Opened(folder, split, task)
    counts = opened.counts
    members = np.array(opened.array("members", [np.int64], (counts["samples"], counts.get("sequences_per_sample", 0))))
    if members.min(initial=0) < 0 or members.max(initial=-1) >= counts.get("sequences", 0):
        raise opened.damaged("members", f"names others than the {counts.get('sequences', 0)} sequences")
    return members


class _Opened:
    """The files of one split, checked against the header."""

    def __init__(self, folder: Path, split: str, task: str):
        if split not in SPLITS:
            raise ValueError(f"split is {split!r}; expected one of {', '.join(SPLITS)}.")
        header = read_header(folder, task)
        self.folder, self.split, self.task = folder, split, task
        self.counts: dict[str, Any] = header["splits"][split]
        self.files: dict[str, Any] = header["files"]

    def array(self, part: str, dtypes: Sequence[DTypeLike], shape: tuple[int, ...]) -> NDArray[Any]:
        path = _path(self.folder, self.split, part)
        try:
            return open_array(path, dtypes, shape, size=self.files.get(path.name, {}).get("bytes", 0))
        except ValueError as error:
            raise self.damaged(part, str(error)) from error

    def damaged(self, part: str, came: str) -> ValueError:
        return damaged(_path(self.folder, self.split, part), came, self.task)


def _path(folder: Path, split: str, part: str) -> Path:
    return folder / f"{split}_{part}.npy"
