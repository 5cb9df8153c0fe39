"""Rows of parquet files, read with pyarrow if it is installed."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nystrom_lab.data.sources.row_files import Wanted, all_as_bytes, find_names

SUFFIX = ".parquet"
_AT_ONCE = 1000


def parquet_columns(path: Path) -> list[str]:
    """The columns of a file.

    Raises:
        ValueError: pyarrow is not installed, or cannot read the file.
    """
    return list(_opened(path).schema_arrow.names)


def parquet_fields(path: Path, wanted: Wanted, *, may_be_null: str | None = None) -> Iterator[tuple[int, list[bytes]]]:
    """Read the wanted fields of each row, with its number from 1; see `row_files.read_fields`.

    Raises:
        ValueError: pyarrow is not installed, the file is broken or lacks a field, or a value is neither text nor
            number.
    """
    opened = _opened(path)
    try:
        names = find_names(opened.schema_arrow.names, wanted)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    for number, row in enumerate(_rows(path, opened, names), start=1):
        try:
            yield number, all_as_bytes([row[name] for name in names], names, wanted, may_be_null)
        except ValueError as error:
            raise ValueError(f"{path}, row {number}: {error}") from error


def _rows(path: Path, opened: Any, names: list[str]) -> Iterator[dict[str, Any]]:
    """The rows; damage in the middle of a file is only noticed when it is read."""
    arrow: Any = importlib.import_module("pyarrow")
    number = 0
    try:
        for batch in opened.iter_batches(batch_size=_AT_ONCE, columns=names):
            for row in batch.to_pylist():
                number += 1
                yield row
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        why = str(error).partition("\n")[0]
        raise ValueError(f"{path} cannot be read after row {number} ({why}): it is damaged, fetch it again.") from error


def _opened(path: Path) -> Any:
    try:
        library: Any = importlib.import_module("pyarrow.parquet")
        arrow: Any = importlib.import_module("pyarrow")
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{path} is parquet, which pyarrow reads: pip install pyarrow, or save the rows as JSON lines."
        ) from error
    try:
        return library.ParquetFile(path, page_checksum_verification=True)
    except (arrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} is not a parquet file, or is truncated ({error}): fetch it again.") from error
