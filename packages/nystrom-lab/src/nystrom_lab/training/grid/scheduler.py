"""Pieces of work, each in a process of this machine or in a job of a cluster: the loop of both.

    FOLDER/NAME.log    the output of a piece

A piece of work that has a result is skipped. A piece that was lost, killed or without memory, is tried once more after
all others, alone. A piece that fails otherwise is named with its log, and the others continue.
"""

import os
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, ClassVar, NamedTuple

from nystrom.progress import Progress
from nystrom.whole_files import check_no_link
from nystrom_lab.training.grid.table import last_line


class Work(NamedTuple):
    """A piece of work, which can be resumed.

    Attributes:
        name: Name of its log.
        function: A function of a module.
        arguments: Plain values, which JSON can hold for a process of this machine.
        result: Result in words, by its files; "" if it is not done.
    """

    name: str
    function: Callable[..., object]
    arguments: Sequence[object]
    result: Callable[[], str]


@dataclass(frozen=True)
class Failure:
    """A piece of work that ended without a result.

    Attributes:
        name: Name of the piece.
        reason: How its process or job ended, and its last line of output.
        log: The file with its full output.
        lost: Whether it may succeed when it is tried again alone.
    """

    name: str
    reason: str
    log: Path
    lost: bool = False


class Scheduler(ABC):
    """Starts pieces of work, and waits for them.

    Args:
        to: The folder of the logs.
        seconds: Time between two looks at what is running.

    Attributes:
        interrupted: End of the message after Ctrl-C: how the work continues.
    """

    interrupted: ClassVar[str]

    def __init__(self, to: Path, seconds: float):
        self.to, self.seconds = to, seconds

    @abstractmethod
    def opened(self) -> AbstractContextManager[object]:
        """Prepare for starting; at the end nothing is left that must not outlive this process."""

    @abstractmethod
    def has_room(self) -> bool:
        """Whether another piece may start now."""

    @abstractmethod
    def start(self, work: Work) -> str:
        """Start a piece of work, and say so."""

    @abstractmethod
    def ended(self, running: Mapping[str, Work]) -> list[Failure]:
        """The pieces that have ended since the last look, each with how it ended, in case that it has no result."""

    def run(self, works: Sequence[Work]) -> list[Failure]:
        """Do the pieces of work that are not done, and print the result of each.

        Returns:
            The pieces that are not done.

        Raises:
            ValueError: Another process does them, or a log is a symbolic link.
        """
        waiting = deque[Work]()
        with self.opened():
            for work in works:
                if result := work.result():
                    print(f"{work.name}: finished before: {result}", flush=True)
                else:
                    check_no_link(self.log(work.name))
                    waiting.append(work)
            return self._finish(waiting, len(works))

    def _finish(self, waiting: deque[Work], total: int) -> list[Failure]:
        again, running = deque[Work](), dict[str, Work]()
        tried, failures, done = set[str](), list[Failure](), total - len(waiting)
        with Progress("runs", total, initial=done) as progress:
            try:
                while waiting or again or running:
                    while (waiting and self.has_room()) or (again and not waiting and not running):
                        work = (waiting or again).popleft()
                        progress.print(f"{work.name}: {self.start(work)}")
                        running[work.name] = work
                    time.sleep(self.seconds)
                    for failure in self.ended(running):
                        work, ending = running.pop(failure.name), failure.reason
                        if result := work.result():
                            done += 1
                            progress.print(f"{work.name}: {result} ({done} of {total})")
                        elif failure.lost and work.name not in tried:
                            tried.add(work.name)
                            again.append(work)
                            progress.print(f"{work.name}: {ending}; goes on later, alone")
                        else:
                            reason = ": ".join(filter(None, [ending, last_line(failure.log)]))
                            failures.append(replace(failure, reason=reason))
                            progress.print(f"{work.name}: failed, {reason}")
                    progress.update(done - progress.done)
            except KeyboardInterrupt:
                progress.print(f"\nStopped with {done} of {total} runs finished{self.interrupted}")
                raise
        return failures

    def log(self, name: str) -> Path:
        """The file with the output of a piece."""
        return self.to / f"{name}.log"


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
