"""A data set of token sequences on disk: one folder, read through memory maps.

    dataset.json         format, version, task, settings, facts found on the way; samples, tokens and classes of a
                         split; size and SHA-256 of a file
    SPLIT_tokens.npy     the tokens of all samples of the split, end to end (unsigned integers)
    SPLIT_offsets.npy    int64, one more than samples: sample i holds tokens[offsets[i]:offsets[i + 1]]
    SPLIT_labels.npy     uint8, one per sample
    SPLIT_members.npy    int64, samples x k, only where a sample is made of k sequences: which ones

with SPLIT one of train, val, test. With members the offsets are those of the sequences, and one that many samples share
is stored once. Nothing is pickled. `new_folder` writes beside the place that was asked for and renames at the end,
`dataset.json` last, so a folder with that file is complete. `open_split` compares the sizes, which takes no time;
`verify` reads everything.
"""

import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nystrom.tasks.store.checksums import sha256

FORMAT, VERSION = "nystrom-tokens", 1
HEADER = "dataset.json"
SPLITS = ("train", "val", "test")
PARTS = ("tokens", "offsets", "labels")
MEMBERS = "members"

Settings = Mapping[str, int | float | str]


class Samples(NamedTuple):
    """Token sequences end to end: sequence i is `tokens[offsets[i]:offsets[i + 1]]`.

    Sample i is sequence i, or the sequences that `open_members` gives; its class is `labels[i]`.
    """

    tokens: NDArray[np.unsignedinteger]
    offsets: NDArray[np.int64]
    labels: NDArray[np.uint8]


def gather(sequences: Sequence[NDArray[np.unsignedinteger]], labels: Sequence[int]) -> Samples:
    """Put sequences end to end."""
    lengths = np.array([0, *map(len, sequences)], dtype=np.int64)
    tokens = np.concatenate(sequences) if sequences else np.zeros(0, dtype=np.uint8)
    return Samples(tokens, lengths.cumsum(), np.array(labels, dtype=np.uint8))


def holds(folder: Path, *, task: str, settings: Settings) -> bool:
    """Tell whether the folder already holds this data set (True) or is free for it (False).

    Raises:
        ValueError: The folder is taken by something else, or by a data set that is damaged.
    """
    try:
        names = sorted(os.listdir(folder))
    except FileNotFoundError:
        return False
    except NotADirectoryError as error:
        raise ValueError(f"{folder} is a file or inside one: name a folder that does not exist yet.") from error
    except OSError as error:
        raise ValueError(f"{folder} cannot be read ({error.strerror}): name a folder you may write to.") from error
    if not names:
        return False
    if HEADER not in names:
        raise ValueError(
            f"{folder} is not empty and holds no data set ({HEADER} is missing, {names[0]} is there):"
            " name a folder that does not exist yet, or empty this one."
        )
    header = _read_header(folder, task)
    there = header["settings"]
    if differing := [key for key in sorted({*there, *settings}) if there.get(key) != settings.get(key)]:
        listed = ", ".join(f"{key}={there.get(key)} there and {settings.get(key)} asked for" for key in differing)
        raise ValueError(
            f"{folder} holds a data set with other settings ({listed}): name another folder, or delete this one."
        )
    for split in SPLITS:
        open_split(folder, split, task=task)
    return True


@contextmanager
def new_folder(to: Path, *, task: str, settings: Settings, facts: Mapping[str, Any] | None = None) -> Iterator[Path]:
    """Lend a folder to write splits into, which becomes `to` when the block ends, and vanishes when the block fails.

    Args:
        to: Folder to make.
        task: Task of the data.
        settings: What decides the data, known before the work.
        facts: What the work finds out, for the header; read when the block ends.

    Raises:
        ValueError: `to` cannot be written; said on entry, before any work.
    """
    # A folder that stands under a mount or under the shell's feet cannot be exchanged for another.
    if to.is_mount() or to == Path.cwd():
        raise ValueError(
            f"{to} is a mount point or the current folder and cannot be replaced: name a folder inside it."
        )
    partial = to.parent / f".{to.name}.{secrets.token_hex(4)}.partial"
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
        (partial / HEADER).touch()
        (partial / HEADER).unlink()
    except OSError as error:
        raise ValueError(
            f"{to} cannot be made ({error.strerror}: {error.filename}): name a folder inside one you may write to."
        ) from error
    try:
        yield partial
        _write_header(partial, task, settings, facts or {})
        try:
            # Takes the place of an empty folder as well.
            partial.replace(to)
        except OSError:
            # Another process may have made the same data set in the meantime; then its folder serves as well.
            if not holds(to, task=task, settings=settings):
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_split(folder: Path, split: str, samples: Samples, members: NDArray[np.int64] | None = None) -> None:
    """Write one split into a folder lent by `new_folder`."""
    for part, array in zip(PARTS, samples, strict=True):
        write_part(folder / f"{split}_{part}.npy", array)
    if members is not None:
        write_part(folder / f"{split}_{MEMBERS}.npy", members)


def write_part(path: Path, array: NDArray[Any]) -> None:
    """Write one file of a split."""
    try:
        np.save(path, array, allow_pickle=False)
    except OSError as error:
        raise OSError(f"{path} needs {array.nbytes} bytes and could not be written ({error}): free space.") from error


def open_split(folder: Path, split: str, *, task: str) -> Samples:
    """Open one split after a check of its sizes; the tokens stay on disk as a read-only memory map.

    Raises:
        ValueError: `split` is unknown, or the folder is missing, incomplete, or of another task or format.
    """
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}.")
    header = _read_header(folder, task)
    parts = [part for part in (*PARTS, MEMBERS) if f"{split}_{part}.npy" in header["files"]]
    for part in parts:
        path = folder / f"{split}_{part}.npy"
        size = path.stat().st_size if path.is_file() else None
        wanted = header["files"][path.name]["bytes"]
        if size != wanted:
            came = "is missing" if size is None else f"has {size} bytes"
            raise _damaged(path, f"{came}, {HEADER} says {wanted} bytes", task)
    try:
        tokens = np.load(folder / f"{split}_tokens.npy", mmap_mode="r", allow_pickle=False)
        offsets = np.load(folder / f"{split}_offsets.npy", allow_pickle=False)
        labels = np.load(folder / f"{split}_labels.npy", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise _damaged(folder / f"{split}_*.npy", f"is not in numpy's file format ({error})", task) from error
    counts = header["splits"][split]
    sequences = counts.get("sequences", counts["samples"])
    for part, array, kind, shape in (
        ("tokens", tokens, "u", (counts["tokens"],)),
        ("offsets", offsets, "i", (sequences + 1,)),
        ("labels", labels, "u", (counts["samples"],)),
    ):
        if array.dtype.kind != kind or array.shape != shape:
            came = f"holds {array.dtype} of shape {array.shape}, {HEADER} says {shape} of kind {kind}"
            raise _damaged(folder / f"{split}_{part}.npy", came, task)
    if offsets[0] != 0 or offsets[-1] != tokens.size or (np.diff(offsets) < 0).any():
        raise _damaged(folder / f"{split}_offsets.npy", f"does not rise from 0 to {tokens.size}", task)
    return Samples(np.asarray(tokens), offsets, labels)


def open_members(folder: Path, split: str, *, task: str) -> NDArray[np.int64] | None:
    """Open the sequences that the samples of a split are made of; None where each sample is one sequence.

    Raises:
        ValueError: The file is damaged.
    """
    counts = _read_header(folder, task)["splits"][split]
    if "sequences" not in counts:
        return None
    path = folder / f"{split}_{MEMBERS}.npy"
    shape = (counts["samples"], counts["sequences_per_sample"])
    try:
        members = np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise _damaged(path, f"is not in numpy's file format ({error})", task) from error
    if members.dtype != np.int64 or members.shape != shape:
        came = f"holds {members.dtype} of shape {members.shape}, {HEADER} says {shape} of kind i"
        raise _damaged(path, came, task)
    if members.min(initial=0) < 0 or members.max(initial=-1) >= counts["sequences"]:
        raise _damaged(path, f"names others than the {counts['sequences']} sequences", task)
    return members


def read_facts(folder: Path, *, task: str) -> dict[str, Any]:
    """Read what was found out when the data set was made; empty where nothing was noted.

    Raises:
        ValueError: The folder holds no complete data set of the task.
    """
    return _read_header(folder, task).get("facts", {})


def read_counts(folder: Path, *, task: str) -> dict[str, int]:
    """Read how many samples each split has, of the header alone.

    Raises:
        ValueError: The folder holds no complete data set of the task.
    """
    return {split: counts["samples"] for split, counts in _read_header(folder, task)["splits"].items()}


def verify(folder: Path, *, task: str) -> None:
    """Read every file and compare its SHA-256 with the one that was taken when it was written.

    Raises:
        ValueError: A file is missing or differs; it is named.
    """
    header = _read_header(folder, task)
    for split in SPLITS:
        open_split(folder, split, task=task)
    for name, wanted in header["files"].items():
        if (came := sha256(folder / name)) != wanted["sha256"]:
            raise _damaged(folder / name, f"has SHA-256 {came}, {HEADER} says {wanted['sha256']}", task)


def _write_header(folder: Path, task: str, settings: Settings, facts: Mapping[str, Any]) -> None:
    splits, files = {}, {}
    labels_of = {split: np.load(folder / f"{split}_labels.npy", allow_pickle=False) for split in SPLITS}
    classes = max(int(labels.max(initial=0)) for labels in labels_of.values()) + 1
    for split, labels in labels_of.items():
        paths = [folder / f"{split}_{part}.npy" for part in (*PARTS, MEMBERS)]
        paths = [path for path in paths if path.stem != f"{split}_{MEMBERS}" or path.exists()]
        tokens, offsets, _, *rest = (np.load(path, mmap_mode="r", allow_pickle=False) for path in paths)
        counts = np.bincount(labels, minlength=classes)
        shares = (counts / max(labels.size, 1)).round(6)
        splits[split] = {"samples": labels.size, "tokens": tokens.size}
        splits[split] |= {"class_counts": counts.tolist(), "class_shares": shares.tolist()}
        for members in rest:
            splits[split] |= {"sequences": offsets.size - 1, "sequences_per_sample": members.shape[1]}
        files |= {path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)} for path in paths}
    header = {"format": FORMAT, "version": VERSION, "numpy": np.__version__, "task": task, "settings": dict(settings)}
    header |= {"facts": dict(facts)} if facts else {}
    header |= {"splits": splits, "files": files}
    (folder / HEADER).write_text(json.dumps(header, indent=1) + "\n", encoding="utf-8")


def _read_header(folder: Path, task: str) -> dict[str, Any]:
    path = folder / HEADER
    if not path.is_file():
        raise _damaged(path, "is missing, so the folder holds no complete data set", task)
    try:
        header = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise _damaged(path, f"is no JSON text ({error})", task) from error
    if not _is_header(header):
        raise _damaged(path, f"is not the header of a data set in the format {FORMAT}", task)
    if header["version"] != VERSION:
        raise _damaged(
            path, f"has version {header['version']} of the format and this library reads version {VERSION}", task
        )
    if header["task"] != task:
        raise ValueError(
            f"{folder} holds the data of {header['task']}, and {task} was asked for: name the folder of {task}."
        )
    return header


def _is_header(header: object) -> bool:
    if not isinstance(header, dict) or header.get("format") != FORMAT or not {"version", "task"} <= header.keys():
        return False
    splits, files = header.get("splits"), header.get("files")
    if not isinstance(splits, dict) or not isinstance(files, dict):
        return False
    names = {f"{split}_{part}.npy" for split in SPLITS for part in PARTS}
    members = {f"{split}_{MEMBERS}.npy" for split in SPLITS}
    complete = splits.keys() == set(SPLITS) and (files.keys() == names or files.keys() == names | members)
    counted = all(isinstance(counts, dict) and isinstance(counts.get("samples"), int) for counts in splits.values())
    return complete and counted and isinstance(header.get("settings"), dict)


def _damaged(path: Path, came: str, task: str) -> ValueError:
    folder = path.parent
    return ValueError(
        f"{path} {came}: delete {folder} if it is there, then run `nystrom data prepare {task} --to {folder}`."
    )
