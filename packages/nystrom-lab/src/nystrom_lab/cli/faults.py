"""Expected errors, reported in one line: user errors (exit code 2) and system errors (exit code 1).

Anything not listed here is a bug in the program and keeps its traceback. Errors of libraries are looked up by name, so
that no library is imported for this: one that was not imported cannot have raised.
"""

import errno
import os
import pickle
import sys
from typing import NamedTuple

from nystrom.printable import printable
from nystrom_lab.cli.arguments import word_after

CALLER, WORLD = 2, 1
# Errors of the system that another name or other rights of a file mend; all others are faults of the world.
_WAYS = {
    errno.ENOENT: "check the name",
    errno.EISDIR: "name a file in it",
    errno.ENOTDIR: "name a folder",
    errno.EEXIST: "choose another name",
    errno.ENOTEMPTY: "choose another name",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ELOOP: "choose another name",
    errno.EACCES: "choose another place, or change its permissions",
    errno.EPERM: "choose another place, or change its permissions",
    errno.EROFS: "choose another place",
}
# No room: a full disk, a quota, or the largest file that is allowed.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Fault(NamedTuple):
    """How a command ends.

    Attributes:
        line: The fault, and what to do.
        code: The exit code.
    """

    line: str
    code: int


def expected(error: Exception, command: str, words: list[str]) -> Fault | None:
    """The line and exit code of an expected error; None for a bug in the program.

    Args:
        command: The command's name; empty if there is none.
    """
    said = _one_line(str(error))
    if isinstance(error, ModuleNotFoundError):
        return Fault(f"{said}: install what the commands need with pip install nystrom-lab.", CALLER)
    if isinstance(error, OSError):
        return _of_system(error, command, words)
    if isinstance(error, ValueError | ArithmeticError):
        return Fault(said, CALLER)
    if isinstance(error, pickle.UnpicklingError):
        return Fault(f"a file holds pickled code, which is never run ({_short(said)}): fetch or make it again.", CALLER)
    if isinstance(error, _of_library("safetensors", "SafetensorError")):
        return Fault(f"{_output(command, words)} cannot be read or written ({said}): {_room(command)}.", WORLD)
    if isinstance(error, (MemoryError, *_of_library("torch", "OutOfMemoryError"))):
        return Fault(f"there is too little memory ({_short(said) or 'none is left'}): process less at a time.", WORLD)
    return None


def _of_system(error: OSError, command: str, words: list[str]) -> Fault:
    if error.errno is None or error.strerror is None:
        # One of ours, or of a library, which says all in its message.
        return Fault(_one_line(str(error)), WORLD)
    # If a file could not be renamed, the second name is the one that the user passed.
    file = error.filename2 if error.filename2 is not None else error.filename
    name = _output(command, words) if file is None else os.fsdecode(file) if isinstance(file, bytes) else str(file)
    if error.errno in _WAYS:
        return Fault(f"{printable(name)} cannot be used ({error.strerror}): {_WAYS[error.errno]}.", CALLER)
    way = _room(command) if error.errno in _FULL else "fix this, then start the same command again"
    return Fault(f"{printable(name)} cannot be read or written ({error.strerror}): {way}.", WORLD)


def _output(command: str, words: list[str]) -> str:
    """The output of a command, as named on the command line."""
    return word_after("--to", words, "") or f"a file of `nystrom {command}`"


def _room(command: str) -> str:
    return f"make room for it or choose another disk, then start `nystrom {command}` again"


def _of_library(library: str, name: str) -> tuple[type[BaseException], ...]:
    """The class of a library if it was imported; otherwise empty."""
    module = sys.modules.get(library)
    return () if module is None else (getattr(module, name),)


def _one_line(text: str) -> str:
    return printable(" ".join(line.strip() for line in text.splitlines() if line.strip()))


def _short(text: str) -> str:
    """The first sentence."""
    return text.partition(". ")[0].rstrip(".")
