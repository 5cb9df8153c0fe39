"""Handle standard streams that are closed, broken or full, and what is printed to them beside results.

A command that writes files continues when its output is closed: `nystrom finetune ... | head -1` trains to the end. Any
other command ends as soon as it cannot print.
"""

import io
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

import nystrom
import nystrom_lab

_OURS = [Path(str(module.__file__)).parent for module in (nystrom, nystrom_lab)]


class ClosedOutput(OSError):
    """The output of a command cannot be written."""


class _Closed(io.TextIOBase):
    """Replaces a standard output that was closed before the command began."""

    def write(self, text: str, /) -> int:
        """Raise, since there is nowhere to write to."""
        raise ClosedOutput("standard output is closed, and this command prints: send it to a file, or to /dev/null.")


class _Stream(io.FileIO):
    """A system stream that discards its output once writing has failed.

    Args:
        descriptor: Its file descriptor.
        lasting: Whether to report this instead of raising.
    """

    def __init__(self, descriptor: int, *, lasting: bool):
        super().__init__(descriptor, "w", closefd=False)
        self.lasting = lasting

    def write(self, content: Any, /) -> int:
        """Write to the stream, or discard the content."""
        try:
            return super().write(content)
        except OSError as error:
            nowhere = os.open(os.devnull, os.O_RDWR)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            if not self.lasting:
                error.filename = "what this command prints"
                raise
            if not isinstance(error, BrokenPipeError):
                print(f"nystrom: no more can be printed ({error.strerror}); the command goes on.", file=sys.stderr)
            return len(content)


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
    now = [_standing(sys.stdout, 1, sys.__stdout__, lasting), _standing(sys.stderr, 2, sys.__stderr__, True)]
    sys.stdout, sys.stderr = now  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        for stream in now:
            # What cannot be printed was told, or comes after a worse fault.
            with suppress(OSError):
                stream.flush()
        sys.stdout, sys.stderr = before


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Print warnings of this project as one line, without the line of code that they come from."""
    usual = warnings.formatwarning

    def say(message, category, filename, lineno, line=None):
        if any(Path(filename).is_relative_to(folder) for folder in _OURS):
            return f"warning: {message}\n"
        return usual(message, category, filename, lineno, line)

    warnings.formatwarning = say
    try:
        yield
    finally:
        warnings.formatwarning = usual


def _standing(stream: TextIO | None, descriptor: int, own: TextIO | None, lasting: bool) -> io.TextIOBase | TextIO:
    if stream is None:
        return open(descriptor, "w", encoding="utf-8", closefd=False) if lasting else _Closed()
    if stream is not own:
        # Somebody has put it in the place of the system's.
        return stream
    stream.flush()
    buffer = io.BufferedWriter(_Stream(descriptor, lasting=lasting))
    lines = bool(getattr(stream, "line_buffering", False))
    return io.TextIOWrapper(buffer, encoding=stream.encoding, errors=stream.errors, line_buffering=lines)
