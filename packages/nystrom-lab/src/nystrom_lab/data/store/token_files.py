"""A prepared data set on disk: token sequences, read through memory maps, and `dataset.json`, which describes them.

    SPLIT_tokens.npy     the tokens of all samples of the split, end to end (unsigned integers)
    SPLIT_offsets.npy    int64, one more than samples: sample i holds tokens[offsets[i]:offsets[i + 1]]
    SPLIT_labels.npy     uint8, one per sample; uint16 for more than 256 classes
    SPLIT_members.npy    int64, samples x k, only where a sample is made of k sequences: which ones

with SPLIT one of train, val, test. With members the offsets are those of the sequences, and one that many samples share
is stored once. The header is written last, so that a folder which has it is complete:

    format version numpy        of the files
    task settings facts         what was prepared, what determines its samples, and what was found on the way
    splits                      of each split: samples, tokens, how many samples of each class
    files                       size and SHA-256 of each file

`open_split` checks all except the tokens themselves; `prepared_folder.verify` reads everything.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from tokenize import TokenError
from typing import Any, NamedTuple

import numpy as np
from numpy.lib import format as npy
from numpy.typing import DTypeLike, NDArray

from nystrom.input_files import read_input
from nystrom.json_files import parse_json
from nystrom.whole_files import write_whole

FORMAT, VERSION = "nystrom-tokens", 1
HEADER = "dataset.json"
SPLITS = ("train", "val", "test")
# Their data can be drawn; all others are prepared from files.
DRAWN = ("listops", "pathfinder")
# Their data are tokens of a tokenizer.
TOKENIZED = ("mlm-sop",)

DataSettings = Mapping[str, int | float | str]


def prepare_command(task: str, *, source: Path | str = "FILES", to: Path | str) -> str:
    """The command that prepares the data of a task."""
    files = "" if task in DRAWN and source == "FILES" else f" --from {source}"
    tokenizer = " --tokenizer FOLDER" if task in TOKENIZED else ""
    return f"`nystrom data prepare {task}{files}{tokenizer} --to {to}`"


def damaged(path: Path, came: str, task: str) -> ValueError:
    """The error for a prepared folder with a modified file."""
    return ValueError(
        f"{path} {came}: the prepared data are damaged. Prepare them again, into a folder that does not exist yet, with"
        f" {prepare_command(task, to='NEW_FOLDER')}."
    )


def write_header(folder: Path, header: Mapping[str, Any]) -> None:
    """Write the header; the format, its version and that of numpy are added."""
    marked = {"format": FORMAT, "version": VERSION, "numpy": np.__version__, **header}
    write_whole(folder / HEADER, json.dumps(marked, indent=1) + "\n")


def read_header(folder: Path, task: str | None = None) -> dict[str, Any]:
    """Read and check the header of a prepared folder, of a task if one is named.

    Raises:
        ValueError: The folder is missing or not prepared, the header is damaged, or the data are of another task.
    """
    path, named = folder / HEADER, task or "TASK"
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder: prepare the data with {prepare_command(named, to=folder)}.")
    if not path.is_file():
        raise ValueError(
            f"{folder} is not prepared ({HEADER} is missing): name a folder that `nystrom data prepare` made, or"
            f" prepare what is in this one with {prepare_command(named, source=folder, to=f'data/{named}')}."
        )
    try:
        header = parse_json(read_input(path))
    except ValueError as error:
        raise damaged(path, str(error), named) from error
    if header.get("format") != FORMAT:
        raise damaged(path, f"is not the header of a data set in the format {FORMAT}", named)
    if header.get("version") != VERSION:
        raise damaged(path, f"has version {header.get('version')} of the format instead of {VERSION}", named)
    if wrong := _wrong_field(header):
        raise damaged(path, f"has no proper field {wrong}", named)
    if task not in (None, header["task"]):
        raise ValueError(f"{folder} holds the data of {header['task']}, not of {task}: name the folder of {task}.")
    return header


def read_facts(folder: Path, *, task: str) -> dict[str, Any]:
    """The facts recorded when the data were prepared; empty if there are none. Raises as `read_header`."""
    return read_header(folder, task).get("facts", {})


def _wrong_field(header: Mapping[str, Any]) -> str | None:
    """Name the first field that is missing or of another type."""
    kinds = {"task": str, "settings": dict, "splits": dict, "files": dict, "facts": dict}
    for name, kind in kinds.items():
        if not isinstance(header.get(name, {} if name == "facts" else None), kind):
            return name
    for split in SPLITS:
        counts = header["splits"].get(split)
        if not isinstance(counts, dict):
            return f"splits.{split}"
        of_several = ("sequences", "sequences_per_sample") if "sequences" in counts else ()
        if not all(_is_count(counts.get(name)) for name in ("samples", "tokens", *of_several)):
            return f"splits.{split}"
        if not isinstance(classes := counts.get("class_counts"), list) or not all(map(_is_count, classes)):
            return f"splits.{split}.class_counts"
    for name, file in header["files"].items():
        known = isinstance(file, dict) and _is_count(file.get("bytes")) and isinstance(file.get("sha256"), str)
        if not known or Path(name).name != name:
            return f"files.{name}"
    return None


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**62


TOKENS = (np.uint8, np.uint16, np.uint32)
LABELS = (np.uint8, np.uint16)
# Errors of numpy 2.4.6 for a file that is no array, or for one with a wrong byte in its header.
NO_ARRAY = (ValueError, TypeError, SyntaxError, TokenError, EOFError)


class TokenSamples(NamedTuple):
    """Token sequences end to end: sequence i is `tokens[offsets[i]:offsets[i + 1]]`.

    Sample i is sequence i, or the sequences that `open_members` gives; its class is `labels[i]`.
    """

    tokens: NDArray[np.unsignedinteger]
    offsets: NDArray[np.int64]
    labels: NDArray[np.unsignedinteger]


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
    labels: NDArray[np.unsignedinteger],
    members: NDArray[np.int64] | None = None,
    *,
    dtype: DTypeLike = np.uint8,
) -> None:
    """Write one split into a folder of `new_folder`.

    Args:
        tokens: Pieces of the tokens of all sequences; they may come while they are written.
        offsets: First token of each sequence, and the end of the last.
        members: Sequences of each sample, if it has several.
    """
    _write(_path(folder, split, "tokens"), dtype, (int(offsets[-1]),), tokens)
    _write(_path(folder, split, "offsets"), np.int64, offsets.shape, [offsets])
    _write(_path(folder, split, "labels"), labels.dtype, labels.shape, [labels])
    if members is not None:
        _write(_path(folder, split, "members"), np.int64, members.shape, [members])


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
    header, counts = _described(folder, split, task)
    sequences = counts.get("sequences", counts["samples"])
    tokens = _opened(folder, split, "tokens", header, TOKENS, (counts["tokens"],))
    offsets = np.array(_opened(folder, split, "offsets", header, [np.int64], (sequences + 1,)))
    labels = np.array(_opened(folder, split, "labels", header, LABELS, (counts["samples"],)))
    if offsets[0] != 0 or offsets[-1] != tokens.size or (np.diff(offsets) < 0).any():
        raise damaged(_path(folder, split, "offsets"), f"does not rise from 0 to {tokens.size}", task)
    wanted = counts["class_counts"]
    if (came := np.bincount(labels, minlength=len(wanted)).tolist()) != wanted:
        raise damaged(_path(folder, split, "labels"), f"has classes of {came} samples instead of {wanted}", task)
    return TokenSamples(tokens, offsets, labels)


def open_members(folder: Path, split: str, *, task: str) -> NDArray[np.int64]:
    """Open the sequences that the samples of a split are made of. Raises as `open_split`."""
    header, counts = _described(folder, split, task)
    shape, sequences = (counts["samples"], counts.get("sequences_per_sample", 0)), counts.get("sequences", 0)
    members = np.array(_opened(folder, split, "members", header, [np.int64], shape))
    if members.min(initial=0) < 0 or members.max(initial=-1) >= sequences:
        raise damaged(_path(folder, split, "members"), f"names others than the {sequences} sequences", task)
    return members


def _described(folder: Path, split: str, task: str) -> tuple[dict[str, Any], dict[str, Any]]:
    if split not in SPLITS:
        raise ValueError(f"split is {split!r}; expected one of {', '.join(SPLITS)}.")
    header = read_header(folder, task)
    return header, header["splits"][split]


def _opened(
    folder: Path,
    split: str,
    part: str,
    header: dict[str, Any],
    dtypes: Sequence[DTypeLike],
    shape: tuple[int, ...],
) -> NDArray[Any]:
    """A file as a read-only memory map, if it is what the header says; nothing is ever unpickled."""
    path = _path(folder, split, part)
    if not path.is_file():
        raise damaged(path, "is missing", header["task"])
    size = header["files"].get(path.name, {}).get("bytes", 0)
    if (came := path.stat().st_size) != size:
        raise damaged(path, f"has {came} bytes instead of {size}", header["task"])
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except NO_ARRAY:
        array = None
    if array is None or array.shape != shape or array.dtype not in dtypes or not array.flags.c_contiguous:
        wanted = " or ".join(np.dtype(dtype).name for dtype in dtypes)
        raise damaged(path, f"does not begin like an array of {wanted} of shape {shape}", header["task"])
    return np.asarray(array)


def _write(path: Path, dtype: DTypeLike, shape: tuple[int, ...], pieces: Iterable[NDArray[Any]]) -> None:
    """Write an array whose rows arrive in pieces, end to end; they are cast to its type.

    They are not copied into a memory map, so that a full disk raises an error and does not kill the process.
    """
    size = 0
    with path.open("wb") as file:
        described = {"descr": npy.dtype_to_descr(np.dtype(dtype)), "fortran_order": False, "shape": shape}
        npy.write_array_header_1_0(file, described)
        for piece in pieces:
            size += piece.size
            file.write(np.ascontiguousarray(piece, dtype=dtype).data)
    assert size == np.prod(shape, dtype=int), f"{size} numbers came for shape {shape}"


def _path(folder: Path, split: str, part: str) -> Path:
    return folder / f"{split}_{part}.npy"
