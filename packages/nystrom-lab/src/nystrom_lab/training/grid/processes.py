"""The processes of `nystrom lra run`: a few at a time, none outlives the command.

Each run is a process of `nystrom_lab.training.grid.child`, which ends with this one, even if this one is killed. A
process that was killed, or ran out of memory, is retried once after all others have ended. A run that fails otherwise
is abandoned, and the others continue. With several GPUs each run sees one, the one with the fewest runs.
"""

import json
import math
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import psutil

from nystrom.progress import Progress
from nystrom.whole_files import check_no_link
from nystrom_lab.training.grid.child import OUT_OF_MEMORY
from nystrom_lab.training.grid.table import last_line, peak_memory, result_of, write_table
from nystrom_lab.training.run_folder import RunFolder

CHILD = (sys.executable, "-m", "nystrom_lab.training.grid.child")


@dataclass(frozen=True)
class Run:
    """One run of the grid.

    Attributes:
        name: Name of its folder.
        arguments: Arguments of `nystrom_lab.training.train.train`, as JSON values.
    """

    name: str
    arguments: Mapping[str, object]


@dataclass(frozen=True)
class Failure:
    """A run that did not finish.

    Attributes:
        name: Name of its folder.
        reason: How its process ended, and its last line of output.
        log: The file with its full output.
    """

    name: str
    reason: str
    log: Path


class Grid:
    """The processes of a grid.

    Args:
        gpus: GPUs for them, in the notation of CUDA_VISIBLE_DEVICES; none if they share the CPU and its memory.
        command: The command that starts the process of a run; its arguments follow as JSON.
    """

    def __init__(self, to: Path, *, jobs: int, gpus: Sequence[str] = (), command: Sequence[str] = CHILD):
        self.to, self.jobs, self.gpus, self.command = to, jobs, gpus, command
        self.running: dict[subprocess.Popen[bytes], Run] = {}
        self.places: dict[subprocess.Popen[bytes], str] = {}
        self.failures: list[Failure] = []
        self.peak, self.done, self.total = 0.0, 0, 0
        self.progress = Progress("runs", shown=False)

    def train(self, runs: Sequence[Run]) -> list[Failure]:
        """Train the runs that are not finished, and print the result of each."""
        waiting = deque(run for run in runs if not RunFolder(self.to / run.name).is_finished)
        self.total, self.done = len(runs), len(runs) - len(waiting)
        self.progress = Progress("runs", self.total, initial=self.done)
        for run in runs:
            if run not in waiting:
                self.progress.print(f"{run.name}: finished before: {self._reached(run)}")
        for run in waiting:
            check_no_link(self._log(run))
        write_table(self.to)
        again: deque[Run] = deque()
        tried: set[str] = set()
        try:
            while waiting or again or self.running:
                while waiting and len(self.running) < self.jobs and self._is_room(psutil.virtual_memory().available):
                    self._start(waiting.popleft())
                if again and not waiting and not self.running:
                    self._start(again.popleft())
                for run, code in self._ended():
                    if code == 0:
                        self._finished(run)
                    elif (code < 0 or code == OUT_OF_MEMORY) and run.name not in tried:
                        tried.add(run.name)
                        again.append(run)
                        self.progress.print(f"{run.name}: {_ending(code)}; goes on later, alone")
                    else:
                        self._failed(run, code)
                self.progress.update(self.done - self.progress.done)
                time.sleep(0.05)
        except KeyboardInterrupt:
            self.progress.print(
                f"\nStopped with {self.done} of {self.total} runs finished; the same command continues."
            )
            raise
        finally:
            self.progress.close()
            self._stop()
        return self.failures

    def _is_room(self, available: int) -> bool:
        """Whether the free memory, in bytes, suffices for another run as large as those so far."""
        return not self.running or bool(self.gpus) or available > 1e6 * self.peak

    def _next_gpu(self) -> str | None:
        """The GPU with the fewest runs; None if there is no choice."""
        if len(self.gpus) < 2:
            return None
        taken = list(self.places.values())
        return min(self.gpus, key=taken.count)

    def _start(self, run: Run) -> None:
        step = RunFolder(self.to / run.name).last_step() if (self.to / run.name).is_dir() else None
        self.progress.print(f"{run.name}: {'starts' if step is None else f'goes on after step {step}'}")
        gpu = self._next_gpu()
        environment = os.environ | {"PYTHONUNBUFFERED": "1"} | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu})
        with open_log(self._log(run)) as log:
            process = subprocess.Popen(
                [*self.command, json.dumps(run.arguments)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                # Ctrl-C is for this process, which ends the others.
                start_new_session=True,
            )
        self.running[process] = run
        if gpu is not None:
            self.places[process] = gpu

    def _ended(self) -> list[tuple[Run, int]]:
        """Runs whose process has ended since the last call, with the exit codes."""
        ended = [(process, code) for process in self.running if (code := process.poll()) is not None]
        for process, _ in ended:
            assert process.stdin is not None
            process.stdin.close()
            self.places.pop(process, None)
        return [(self.running.pop(process), code) for process, code in ended]

    def _finished(self, run: Run) -> None:
        self.done += 1
        write_table(self.to)
        self.progress.print(f"{run.name}: {self._reached(run)} ({self.done} of {self.total})")

    def _failed(self, run: Run, code: int) -> None:
        last = last_line(self._log(run))
        self.failures.append(Failure(run.name, f"{_ending(code)}: {last}" if last else _ending(code), self._log(run)))
        self.progress.print(f"{run.name}: failed, {self.failures[-1].reason}")

    def _reached(self, run: Run) -> str:
        folder = RunFolder(self.to / run.name)
        self.peak = max(self.peak, 0.0 if math.isnan(peak := peak_memory(folder)) else peak)
        return result_of(folder)

    def _log(self, run: Run) -> Path:
        return self.to / f"{run.name}.log"

    def _stop(self) -> None:
        """End the processes that still run by closing their input."""
        for process in self.running:
            assert process.stdin is not None
            process.stdin.close()
        for process in self.running:
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _ending(code: int) -> str:
    if code == OUT_OF_MEMORY:
        return "no memory was left"
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"


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
