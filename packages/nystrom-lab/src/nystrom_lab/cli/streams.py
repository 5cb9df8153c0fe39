"""Standard streams that are closed, broken or full, and warnings of this project in one line.

A command that writes files continues when its output is closed: `nystrom finetune ... | head -1` trains to the end. Any
other command ends as soon as it cannot print.
"""

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

import nystrom
import nystrom_lab

_OURS = [Path(str(module.__file__)).parent for module in (nystrom, nystrom_lab)]


class _Stream:
    """A stream of the system, None if closed, which takes all that follows once it could not be written."""

    def __init__(self, stream: TextIO | None, descriptor: int, *, lasting: bool):
        self._closed, self._lasting = stream is None and not lasting, lasting
        self._stream = stream or os.fdopen(descriptor, "w", closefd=False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        if self._closed:
            raise OSError("standard output is closed, and this command prints: send it to a file, or to /dev/null.")
        self._attempt(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._attempt(self._stream.flush)

    def _attempt(self, act: Callable[[], object]) -> None:
        try:
            act()
        except OSError as error:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
            if not self._lasting:
                error.filename = "what this command prints"
                raise
            if not isinstance(error, BrokenPipeError) and self._stream is not sys.__stderr__:
                print(f"nystrom: no more can be printed ({error.strerror}); the command goes on.", file=sys.stderr)


@contextmanager
def standing_streams(*, lasting: bool) -> Iterator[None]:
    """Give a command streams that it can print to, whatever their state.

    Args:
        lasting: Whether the command continues when it cannot print.
    """
    before = sys.stdout, sys.stderr
    # Files that are opened later must not take the numbers of closed streams: what others print would go into them.
    while (free := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(free)
    # What somebody put in their place stays.
    if before[0] is sys.__stdout__:
        sys.stdout = _Stream(before[0], 1, lasting=lasting)  # pyright: ignore[reportAttributeAccessIssue]
    if before[1] is sys.__stderr__:
        sys.stderr = _Stream(before[1], 2, lasting=True)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            # What cannot be printed was told, or comes after a worse fault.
            with suppress(OSError):
                stream.flush()
        sys.stdout, sys.stderr = before


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Print warnings of this project as one line, without the line of code that they come from."""
    usual = warnings.formatwarning

    def say(message, category, filename, *others):
        ours = any(Path(filename).is_relative_to(folder) for folder in _OURS)
        return f"warning: {message}\n" if ours else usual(message, category, filename, *others)

    warnings.formatwarning = say
    try:
        yield
    finally:
        warnings.formatwarning = usual
