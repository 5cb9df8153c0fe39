"""Read the files of cifar-10-batches-py, which are pickles, so that nothing in them can run.

A pickle is a program. What it may do here is decided twice, and denied by default. `pickletools.genops` reads it as
text, and every step must be one of those that the published files are made of. Then an unpickler whose `find_class`
knows four names follows it; even for those it returns stand-ins of this module, never numpy's own objects, since
numpy's own arrays and types trust the state that a pickle gives them.

Steps that call, name or build anything else, places in memory that the file is too short for, and tuples nested deeply
(which Python's hash would follow down without a limit) are errors.
"""

import io
import pickle
import pickletools
from typing import Any

import numpy as np
from numpy.typing import NDArray

WHERE_PUBLISHED = (
    "CIFAR-10 is published at https://www.cs.toronto.edu/~kriz/cifar.html as cifar-10-python.tar.gz (folder"
    " cifar-10-batches-py) and cifar-10-binary.tar.gz (folder cifar-10-batches-bin)."
)
# fmt: off
STEPS = {
    "PROTO", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "BINSTRING",
    "SHORT_BINSTRING", "EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "APPEND",
    "APPENDS", "SETITEM", "SETITEMS", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET", "GLOBAL", "REDUCE", "BUILD",
}
# fmt: on
MOST_TUPLES = 100


class _Uint8:
    """Stand-in for `numpy.dtype`; only the dtype of pixels is known."""

    def __init__(self, kind: object, *_: object):
        if kind != b"u1":
            raise ValueError("its array is not of uint8")

    def __setstate__(self, state: object) -> None:
        """Pass over the byte order, which a byte does not have."""


class _Array:
    """Stand-in for `numpy._reconstruct`, which creates an array that its state then fills."""

    pixels: NDArray[np.uint8] | None = None

    def __init__(self, kind: object, *_: object):
        if kind != "ndarray":
            raise ValueError("it reconstructs something else than an array")

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran, content = state
        if not isinstance(dtype, _Uint8) or fortran is not False or not isinstance(content, bytes):
            raise ValueError("its array is not of uint8, row after row")
        self.pixels = np.frombuffer(content, dtype=np.uint8).reshape(shape)


class _Unpickler(pickle.Unpickler):
    known = {  # noqa: RUF012
        ("numpy.core.multiarray", "_reconstruct"): _Array,
        ("numpy._core.multiarray", "_reconstruct"): _Array,
        ("numpy", "dtype"): _Uint8,
        # A word, which can be neither called nor built.
        ("numpy", "ndarray"): "ndarray",
    }

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) not in self.known:
            raise ValueError(f"it asks for {module_name} {global_name}"[:80])
        return self.known[module_name, global_name]


def read_pickled_batch(content: bytes, place: str) -> dict[bytes, Any]:
    """Read one file.

    Args:
        content: What the file holds.
        place: Its name, for errors.

    Returns:
        Its dict, with keys such as b"data", a uint8 array, and b"labels", a list.

    Raises:
        ValueError: It is cut short, or does something else than the published files do.
    """
    try:
        _check_steps(content)
        batch = _Unpickler(io.BytesIO(content), encoding="bytes").load()
    except (ValueError, LookupError, TypeError, AttributeError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(
            f"{place} is not one of the published files of cifar-10-batches-py, or is cut short ({error}); nothing in"
            f" it was run. {WHERE_PUBLISHED}"
        ) from error
    if not isinstance(batch, dict):
        raise ValueError(f"{place} holds {type(batch).__name__}, not the dict of a published file. {WHERE_PUBLISHED}")
    return {key: value.pixels if isinstance(value, _Array) else value for key, value in batch.items()}


def _check_steps(content: bytes) -> None:
    tuples = 0
    for opcode, argument, _ in pickletools.genops(content):
        if opcode.name not in STEPS:
            raise ValueError(f"it has the step {opcode.name}")
        # The unpickler makes room for all places up to the largest.
        if opcode.name == "LONG_BINPUT" and (argument or 0) > len(content):
            raise ValueError(f"it remembers something in place {argument}")
        tuples += opcode.name.startswith("TUPLE")
        if tuples > MOST_TUPLES:
            raise ValueError(f"it has more than {MOST_TUPLES} tuples")
