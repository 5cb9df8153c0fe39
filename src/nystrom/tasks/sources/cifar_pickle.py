"""Read the files of cifar-10-batches-py, which are pickles, without unpickling.

A pickle is a program, and loading one runs it. Here the program is read as text by `pickletools.genops`, which runs
nothing, and followed by a machine that knows the few steps that the published files are made of: it builds bytes,
numbers, lists, tuples and dicts, and one form of array, uint8, out of its bytes. Any other step or name is refused.
"""

import pickletools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

# The only names that the published files call, which here stand for themselves and are never looked up.
RECONSTRUCT = ("numpy.core.multiarray _reconstruct", "numpy._core.multiarray _reconstruct")
NDARRAY, DTYPE = "numpy ndarray", "numpy dtype"


class _Name(NamedTuple):
    text: str


class _Array:
    """An array that is still without content."""

    pixels: np.ndarray[Any, np.dtype[np.uint8]] | None = None


class _Uint8:
    """The dtype of pixels."""


PUBLISHED = (
    "CIFAR-10 is published at https://www.cs.toronto.edu/~kriz/cifar.html as cifar-10-python.tar.gz (folder"
    " cifar-10-batches-py) and cifar-10-binary.tar.gz (folder cifar-10-batches-bin)."
)
MARK = object()


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
    machine = _Machine()
    try:
        for opcode, argument, _ in pickletools.genops(content):
            step = STEPS.get(opcode.name)
            if step is None:
                raise ValueError(f"it has the step {opcode.name}")
            step(machine, argument)
        (batch,) = machine.stack
    except (ValueError, IndexError, KeyError, TypeError) as error:
        raise ValueError(
            f"{place} is not one of the published files of cifar-10-batches-py, or is cut short ({error}); it was not"
            f" loaded, since loading runs it. {PUBLISHED}"
        ) from error
    if not isinstance(batch, dict):
        raise ValueError(f"{place} holds {type(batch).__name__}, not the dict of a published file. {PUBLISHED}")
    return {key: value.pixels if isinstance(value, _Array) else value for key, value in batch.items()}


class _Machine:
    """The stack and the memory of a pickle."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memory: dict[int, Any] = {}

    def pop_mark(self) -> list[Any]:
        """Take what lies above the last mark."""
        place = len(self.stack) - 1 - self.stack[::-1].index(MARK)
        above = self.stack[place + 1 :]
        del self.stack[place:]
        return above

    def put(self, number: int) -> None:
        """Remember the top."""
        self.memory[number] = self.stack[-1]

    def tuple_of(self, count: int) -> None:
        """Make a tuple of the topmost values."""
        taken = tuple(self.stack[-count:])
        del self.stack[-count:]
        self.stack.append(taken)

    def extend(self, values: list[Any]) -> None:
        """Add to the list on the top."""
        if not isinstance(self.stack[-1], list):
            raise ValueError(f"it appends to a {type(self.stack[-1]).__name__}")
        self.stack[-1].extend(values)

    def set_items(self, values: list[Any]) -> None:
        """Add keys and values to the dict on the top."""
        if not isinstance(self.stack[-1], dict):
            raise ValueError(f"it sets items of a {type(self.stack[-1]).__name__}")
        self.stack[-1].update(zip(values[::2], values[1::2], strict=True))

    def name(self, text: str) -> None:
        """Stand for one of the known names."""
        if text not in (*RECONSTRUCT, NDARRAY, DTYPE):
            raise ValueError(f"it asks for {text}")
        self.stack.append(_Name(text))

    def reduce(self) -> None:
        """Begin an array, or the dtype uint8."""
        arguments, called = self.stack.pop(), self.stack.pop()
        if isinstance(called, _Name) and called.text in RECONSTRUCT and arguments[0] == _Name(NDARRAY):
            self.stack.append(_Array())
        elif called == _Name(DTYPE) and arguments[0] == b"u1":
            self.stack.append(_Uint8())
        else:
            raise ValueError(f"it calls {called} with {str(arguments)[:40]}")

    def build(self) -> None:
        """Fill the array on the top."""
        state, built = self.stack.pop(), self.stack[-1]
        if isinstance(built, _Uint8):
            return
        if not isinstance(built, _Array):
            raise ValueError(f"it builds a {type(built).__name__}")
        _, shape, dtype, fortran, content = state
        if not isinstance(dtype, _Uint8) or fortran or not isinstance(content, bytes):
            raise ValueError("its array is not of uint8, row after row")
        built.pixels = np.frombuffer(content, dtype=np.uint8).reshape(shape)


def _push(machine: _Machine, value: Any) -> None:
    machine.stack.append(value)


def _push_bytes(machine: _Machine, value: str) -> None:
    # genops gives the bytes of an old string as latin-1.
    machine.stack.append(value.encode("latin-1"))


STEPS: dict[str, Callable[[_Machine, Any], None]] = {
    "PROTO": lambda machine, version: None,
    "STOP": lambda machine, _: None,
    "MARK": lambda machine, _: machine.stack.append(MARK),
    "NONE": lambda machine, _: machine.stack.append(None),
    "NEWTRUE": lambda machine, _: machine.stack.append(True),
    "NEWFALSE": lambda machine, _: machine.stack.append(False),
    "BININT": _push,
    "BININT1": _push,
    "BININT2": _push,
    "BINSTRING": _push_bytes,
    "SHORT_BINSTRING": _push_bytes,
    "EMPTY_DICT": lambda machine, _: machine.stack.append({}),
    "EMPTY_LIST": lambda machine, _: machine.stack.append([]),
    "EMPTY_TUPLE": lambda machine, _: machine.stack.append(()),
    "TUPLE": lambda machine, _: machine.stack.append(tuple(machine.pop_mark())),
    "TUPLE1": lambda machine, _: machine.tuple_of(1),
    "TUPLE2": lambda machine, _: machine.tuple_of(2),
    "TUPLE3": lambda machine, _: machine.tuple_of(3),
    "APPEND": lambda machine, _: machine.extend([machine.stack.pop()]),
    "APPENDS": lambda machine, _: machine.extend(machine.pop_mark()),
    "SETITEM": lambda machine, _: machine.set_items([machine.stack.pop(-2), machine.stack.pop()]),
    "SETITEMS": lambda machine, _: machine.set_items(machine.pop_mark()),
    "BINPUT": _Machine.put,
    "LONG_BINPUT": _Machine.put,
    "BINGET": lambda machine, number: machine.stack.append(machine.memory[number]),
    "LONG_BINGET": lambda machine, number: machine.stack.append(machine.memory[number]),
    "GLOBAL": _Machine.name,
    "REDUCE": lambda machine, _: machine.reduce(),
    "BUILD": lambda machine, _: machine.build(),
}
