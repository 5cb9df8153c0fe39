"""Folders written by `Dataset.save_to_disk` or `DatasetDict.save_to_disk` of Hugging Face datasets.

    dataset_dict.json                     the names of the splits, each a folder of its own
    state.json                            the files of a split
    data-00000-of-00002.arrow             rows, as a stream of Arrow
    dataset_info.json                     the features; a ClassLabel has names for its numbers

pyarrow reads them, which datasets itself is built on; datasets need not be installed.
"""

import importlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nystrom_lab.data.sources.row_files import Wanted, all_as_bytes, find_names

_SPLITS, _STATE, _INFO = "dataset_dict.json", "state.json", "dataset_info.json"
_AT_ONCE = 1000


@dataclass(frozen=True)
class SavedPart:
    """One split.

    Attributes:
        folder: The folder that was saved.
        split: The name of the split; "train" if the folder is not divided.
        files: Its files, in their order.
        columns: Its columns.
        classes: Names of the classes by column, if present.
    """

    folder: Path
    split: str
    files: tuple[Path, ...]
    columns: tuple[str, ...]
    classes: Mapping[str, tuple[str, ...]]

    def __str__(self) -> str:
        return f"{self.folder}, {self.split}"

    def __len__(self) -> int:
        return sum(batch.num_rows for batch in self._batches())

    def find(self, wanted: Wanted) -> list[str]:
        """Find the one name of each wanted field; see `row_files.find_names`.

        Raises:
            ValueError: None of the names of a field is present, or several are.
        """
        try:
            return find_names(self.columns, wanted)
        except ValueError as error:
            raise ValueError(f"{self}: {error}") from error

    def fields(self, wanted: Wanted, *, may_be_null: str | None = None) -> Iterator[tuple[int, list[bytes]]]:
        """Read the wanted fields of each row, with its number from 1; see `row_files.read_fields`.

        The number of a class becomes its name; one that has none, such as the -1 of a text without a label, stays.

        Raises:
            ValueError: A file is broken or lacks a field, or a value is neither text nor number.
        """
        names = self.find(wanted)
        number = 0
        for batch in self._batches():
            for start in range(0, batch.num_rows, _AT_ONCE):
                part = batch.slice(start, _AT_ONCE)
                for values in zip(*(part.column(name).to_pylist() for name in names), strict=True):
                    number += 1
                    try:
                        named = [self._named(value, name) for value, name in zip(values, names, strict=True)]
                        yield number, all_as_bytes(named, names, wanted, may_be_null)
                    except ValueError as error:
                        raise ValueError(f"{self}, row {number}: {error}") from error

    def _named(self, value: object, name: str) -> object:
        classes = self.classes.get(name, ())
        return classes[value] if isinstance(value, int) and 0 <= value < len(classes) else value

    def _batches(self) -> Iterator[Any]:
        for file in self.files:
            with _stream(file) as (mapped, batches):
                end = mapped.tell()
                for batch in batches:
                    end = mapped.tell()
                    yield batch
                # pyarrow takes the end of a file for the mark that ends a stream.
                if end == mapped.size():
                    raise _broken(file, "it ends before its end mark, so rows may be missing")


def is_saved_dataset(folder: Path) -> bool:
    """Whether `save_to_disk` of the package datasets wrote a folder."""
    return any((folder / name).is_file() for name in (_SPLITS, _STATE))


def saved_parts(folder: Path) -> dict[str, SavedPart]:
    """Open a folder that `save_to_disk` wrote.

    Returns:
        Its splits by name; only "train" if it is not divided.

    Raises:
        ValueError: pyarrow is not installed, or a file is missing or broken.
    """
    if not (folder / _SPLITS).is_file():
        return {"train": _part(folder, folder, "train")}
    names = _read(folder / _SPLITS).get("splits")
    if not isinstance(names, list) or not all(_is_name(name) for name in names):
        raise _broken(folder / _SPLITS, "it names no splits")
    return {name: _part(folder, folder / name, name) for name in names}


def _part(folder: Path, place: Path, split: str) -> SavedPart:
    state, info = _read(place / _STATE), _read(place / _INFO) if (place / _INFO).is_file() else {}
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise _broken(place / _STATE, "its rows are chosen by a file of indices, as an early version of datasets wrote")
    listed = state.get("_data_files")
    names = [entry.get("filename") if isinstance(entry, dict) else None for entry in listed or ()]
    if not names or not all(_is_name(name) for name in names):
        raise _broken(place / _STATE, "it names no files of rows")
    files = tuple(place / str(name) for name in names)
    with _stream(files[0]) as (_, batches):
        columns = tuple(batches.schema.names)
    features = info.get("features")
    classes = {
        name: tuple(map(str, feature["names"]))
        for name, feature in (features if isinstance(features, dict) else {}).items()
        if isinstance(feature, dict) and feature.get("_type") == "ClassLabel" and feature.get("names")
    }
    return SavedPart(folder, split, files, columns, classes)


def _is_name(name: object) -> bool:
    """Whether it names something in the folder itself."""
    return isinstance(name, str) and name not in ("", "..") and Path(name).name == name


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _broken(path, str(error)) from error
    if not isinstance(content, dict):
        raise _broken(path, "it holds no JSON object")
    return content


@contextmanager
def _stream(file: Path) -> Iterator[tuple[Any, Any]]:
    """A file, mapped into memory, and its batches."""
    try:
        arrow: Any = importlib.import_module("pyarrow")
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{file} was saved by Hugging Face datasets, and pyarrow reads it: pip install pyarrow, or save each split "
            "with its to_json as train.jsonl, val.jsonl and test.jsonl and name their folder."
        ) from error
    try:
        with arrow.memory_map(str(file)) as mapped, arrow.ipc.open_stream(mapped) as batches:
            yield mapped, batches
    except (arrow.ArrowException, OSError) as error:
        raise _broken(file, str(error).partition("\n")[0]) from error


def _broken(path: Path, why: str) -> ValueError:
    return ValueError(f"{path} cannot be read ({why}): save the data set again, with its save_to_disk.")
