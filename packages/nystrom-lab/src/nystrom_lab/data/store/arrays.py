"""One- and two-dimensional integer arrays in numpy's file format.

Files are written in pieces and read without parsing their header: the reader knows the types and the shape that it
wants, so it compares the first bytes of the file with the header of such an array. Nothing is ever unpickled.
"""

import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import DTypeLike, NDArray


def write_array(path: Path, dtype: DTypeLike, shape: tuple[int, ...], pieces: Iterable[NDArray[Any]]) -> None:
    """Write an array whose rows arrive in pieces.

    The pieces are written, not copied into a memory map, so that a full disk raises an error and does not kill the
    process.

    Args:
        path: File to write.
        dtype: Type of the array; the pieces are cast to it.
        shape: Shape of the whole.
        pieces: Arrays that make up the whole, end to end.

    Raises:
        OSError: The file cannot be written.
    """
    size = 0
    with path.open("wb") as file:
        file.write(_header(np.dtype(dtype), shape))
        for piece in pieces:
            size += piece.size
            file.write(np.ascontiguousarray(piece, dtype=dtype).data)
    assert size == np.prod(shape, dtype=int), f"{size} numbers came for shape {shape}"


def open_array(path: Path, dtypes: Sequence[DTypeLike], shape: tuple[int, ...], *, size: int) -> NDArray[Any]:
    """Open an array as a read-only memory map.

    Args:
        path: File.
        dtypes: Allowed types.
        shape: Its shape.
        size: Bytes of the file.

    Raises:
        ValueError: The file is missing, or does not match; the message is the second half of a sentence.
    """
    if not path.is_file():
        raise ValueError("is missing")
    if (came := path.stat().st_size) != size:
        raise ValueError(f"has {came} bytes instead of {size}")
    with path.open("rb") as file:
        start = file.read(1024)
    for dtype in [np.dtype(each) for each in dtypes]:
        header = _header(dtype, shape)
        count = int(np.prod(shape, dtype=object))
        if start.startswith(header) and size == len(header) + count * dtype.itemsize:
            if not count:
                return np.zeros(shape, dtype=dtype)
            return np.asarray(np.memmap(path, dtype=dtype, mode="r", offset=len(header), shape=shape))
    wanted = " or ".join(np.dtype(dtype).name for dtype in dtypes)
    raise ValueError(f"does not begin like an array of {wanted} of shape {shape}")


def _header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    written = io.BytesIO()
    described = {"descr": npy.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    npy.write_array_header_1_0(written, described)
    return written.getvalue()
