"""Rows that pyarrow reads: parquet files, and folders of `save_to_disk` of Hugging Face datasets.

    dataset_dict.json                     the names of the splits, each a folder of its own
    state.json                            the files of a split
    data-00000-of-00002.arrow             rows, as a stream of Arrow
    dataset_info.json                     the features; a ClassLabel has names for its numbers

The package datasets need not be installed.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nystrom.input_files import read_input
from nystrom.json_files import parse_json
from nystrom_lab.data.sources.columns import Wanted, all_as_bytes, find_names

PARQUET = ".parquet"
_SPLITS, _STATE, _INFO = "dataset_dict.json", "state.json", "dataset_info.json"
_AT_ONCE = 1000


@dataclass(frozen=True)
class SavedPart:
    """One split of a saved folder, "train" if it is not divided; `classes` are the names of classes by column."""

    folder: Path
    split: str
    files: tuple[Path, ...]
    columns: tuple[str, ...]
    classes: Mapping[str, tuple[str, ...]]

    def __str__(self) -> str:
        return f"{self.folder}, {self.split}"


def is_arrow(part: Path | SavedPart) -> bool:
    """Whether pyarrow reads the rows, judging by the name of a file."""
    return isinstance(part, SavedPart) or part.suffix.lower() == PARQUET


def columns_of(part: Path | SavedPart) -> Sequence[str]:
    """The columns of a saved split, or of a parquet file; raises ValueError if pyarrow cannot read that."""
    return part.columns if isinstance(part, SavedPart) else list(_opened_parquet(part).schema_arrow.names)


def find_columns(part: Path | SavedPart, wanted: Wanted) -> list[str]:
    """Find the one name of each wanted field, or raise ValueError; see `columns.find_names`."""
    try:
        return find_names(columns_of(part), wanted)
    except ValueError as error:
        raise ValueError(f"{part}: {error}") from error


def arrow_fields(
    part: Path | SavedPart, wanted: Wanted, *, may_be_null: str | None = None
) -> Iterator[tuple[int, list[bytes]]]:
    """Read the wanted fields of each row, with its number from 1; see `row_files.read_fields`.

    The number of a class becomes its name; one that has none, such as the -1 of a text without a label, stays.
    """
    names = find_columns(part, wanted)
    classes = [part.classes.get(name, ()) if isinstance(part, SavedPart) else () for name in names]
    batches = _saved_batches(part) if isinstance(part, SavedPart) else _parquet_batches(part, names)
    rows = (
        row
        for batch in batches
        for start in range(0, batch.num_rows, _AT_ONCE)
        for row in zip(*(batch.column(name).slice(start, _AT_ONCE).to_pylist() for name in names), strict=True)
    )
    number = 0
    while True:
        try:
            row = next(rows, None)
        except UnicodeDecodeError as error:
            raise ValueError(f"{part} cannot be read after row {number} ({error}): save it as UTF-8.") from error
        if row is None:
            return
        number += 1
        named = [
            words[value] if isinstance(value, int) and 0 <= value < len(words) else value
            for value, words in zip(row, classes, strict=True)
        ]
        try:
            fields = all_as_bytes(named, names, wanted, may_be_null)
        except ValueError as error:
            raise ValueError(f"{part}, row {number}: {error}") from error
        yield number, fields


def is_saved_dataset(folder: Path) -> bool:
    """Whether `save_to_disk` of the package datasets wrote a folder."""
    return any((folder / name).is_file() for name in (_SPLITS, _STATE))


def files_of_saved(folder: Path) -> list[Path]:
    """The files of a saved folder, without what datasets keeps for itself."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("cache-"))


def saved_parts(folder: Path) -> dict[str, SavedPart]:
    """The splits, by name, of a folder that `save_to_disk` wrote: "train" if it is not divided.

    Raises:
        ValueError: A file is missing or broken.
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
        return parse_json(read_input(path))
    except (OSError, ValueError) as error:
        raise _broken(path, f"it {error}" if isinstance(error, ValueError) else str(error)) from error


def _saved_batches(part: SavedPart) -> Iterator[Any]:
    for file in part.files:
        with _stream(file) as (mapped, batches):
            end = mapped.tell()
            for batch in batches:
                end = mapped.tell()
                yield batch
            # pyarrow 26.0.1 takes the end of a file for the mark that ends a stream.
            if end == mapped.size():
                raise _broken(file, "it ends before its end mark, so rows may be missing")


@contextmanager
def _stream(file: Path) -> Iterator[tuple[Any, Any]]:
    """A file, mapped into memory, and its batches."""
    import pyarrow

    try:
        with pyarrow.memory_map(str(file)) as mapped, pyarrow.ipc.open_stream(mapped) as batches:
            yield mapped, batches
    except (pyarrow.ArrowException, OSError) as error:
        raise _broken(file, str(error).partition("\n")[0]) from error


def _broken(path: Path, why: str) -> ValueError:
    return ValueError(f"{path} cannot be read ({why}): save the data set again, with its save_to_disk.")


def _opened_parquet(path: Path) -> Any:
    import pyarrow
    import pyarrow.parquet

    if not path.is_file():
        raise ValueError(f"{path} does not exist or is not a file: name the file to read.")
    try:
        return pyarrow.parquet.ParquetFile(path, page_checksum_verification=True)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} is not a parquet file, or is truncated ({error}): fetch it again.") from error


def _parquet_batches(path: Path, names: list[str]) -> Iterator[Any]:
    """The batches; damage in the middle of a file is only noticed when it is read."""
    import pyarrow

    number = 0
    try:
        for batch in _opened_parquet(path).iter_batches(batch_size=_AT_ONCE, columns=names):
            yield batch
            number += batch.num_rows
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        why = str(error).partition("\n")[0]
        raise ValueError(f"{path} cannot be read after row {number} ({why}): it is damaged, fetch it again.") from error
