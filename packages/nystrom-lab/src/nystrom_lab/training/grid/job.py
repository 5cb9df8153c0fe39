"""The function that runs in a SLURM job, with its output in a log.

submitit catches the signal before preemption or the time limit, and requeues the job; the function then continues from
its last checkpoint.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from submitit.helpers import Checkpointable

from nystrom.whole_files import check_no_link


class LoggedCall(Checkpointable):
    """A function of a module, whose output in a job is added to a log."""

    def __init__(self, function: Callable[..., object], log: Path):
        # Rows name the command that they come from.
        self.function, self.log, self.words = function, log, list(sys.argv)

    def __call__(self, *arguments: object) -> None:
        """Call the function."""
        with open_log(self.log) as log:
            for stream in (1, 2):
                os.dup2(log.fileno(), stream)
        sys.argv = self.words
        self.function(*arguments)


def open_log(path: Path) -> BinaryIO:
    """Open a file to append to; it is created if missing.

    Raises:
        ValueError: It is a symbolic link.
        OSError: It cannot be opened.
    """
    check_no_link(path)
    # Windows has no such flag.
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
    return os.fdopen(file, "ab")
