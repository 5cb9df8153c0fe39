"""Standard streams that are closed, broken or full, or meet control characters, and warnings in one line.

A command that writes files continues when its output is closed: `nystrom finetune ... | head -1` trains to the end. Any
other command ends as soon as it cannot print.

Whatever is printed goes through these streams, which escape control characters: names of files, and what a file holds,
must not control a terminal. Bars of progress, and the styles of tables and help, do control it.
"""

import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

import nystrom
import nystrom_lab
from nystrom.printable import printable

# tqdm writes a bar as a return and then text, or as moves of the cursor alone.
_OF_BAR = re.compile(r"(\r[^\x00-\x1f\x7f-\x9f]*)+|\n*(\x1b\[A)*")
_OURS = [Path(str(module.__file__)).parent for module in (nystrom, nystrom_lab)]


class _Stream:
    """A stream of the system, None if closed, which takes all that follows once it could not be written."""

    def __init__(self, stream: TextIO | None, descriptor: int, *, lasting: bool):
        self._closed, self._lasting = stream is None and not lasting, lasting
        self._stream, self._has_bars = stream or os.fdopen(descriptor, "w", closefd=False), descriptor == 2

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @property
    def styled(self) -> "_Styled":
        """The same stream for what draws."""
        return _Styled(self)

    def write(self, text: str) -> int:
        return self.draw(text if self._has_bars and _OF_BAR.fullmatch(text) else printable(text))

    def draw(self, text: str) -> int:
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


class _Styled:
    """A stream that takes control characters."""

    def __init__(self, stream: _Stream):
        self._stream, self.write = stream, stream.draw

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def standing_streams(*, lasting: bool) -> Iterator[None]:
    """Give a command streams that it can print to, regardless of their state.

    Args:
        lasting: Whether the command continues when it cannot print.
    """
    before = sys.stdout, sys.stderr
    # Files that are opened later must not take the numbers of closed streams: what others print would go into them.
    while (free := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(free)
    # A stream that another program put in their place stays.
    if before[0] is sys.__stdout__:
        sys.stdout = _Stream(before[0], 1, lasting=lasting)  # pyright: ignore[reportAttributeAccessIssue]
    if before[1] is sys.__stderr__:
        sys.stderr = _Stream(before[1], 2, lasting=True)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            # The fault of this output was reported, or a worse one came before it.
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
