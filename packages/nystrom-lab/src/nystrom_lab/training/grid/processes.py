"""Pieces of work as processes of this machine: a few at a time, none outlives the command.

Each is a process of `nystrom_lab.training.grid.child`, which ends with this one, even if this one is killed. With
several GPUs each process sees one, the one with the fewest processes.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil

from nystrom_lab.training.grid.child import OUT_OF_MEMORY
from nystrom_lab.training.grid.scheduler import Failure, Scheduler, Work, open_log
from nystrom_lab.training.grid.table import peak_memory
from nystrom_lab.training.run_folder import RunFolder

CHILD = (sys.executable, "-m", "nystrom_lab.training.grid.child")


class LocalJob(NamedTuple):
    """A process, and its GPU; None if there is no choice."""

    process: subprocess.Popen[bytes]
    gpu: str | None

    def close(self) -> None:
        """End the process, which ends when its input does."""
        assert self.process.stdin is not None
        self.process.stdin.close()


class Processes(Scheduler):
    """The trainings of a folder of runs, as processes.

    Args:
        jobs: Processes at a time.
        gpus: GPUs for them, in the notation of CUDA_VISIBLE_DEVICES; none if they share the CPU and its memory.
        command: The command that starts a process; the name of a function and its arguments as JSON follow.
    """

    interrupted = "; the same command continues."

    def __init__(self, to: Path, *, jobs: int, gpus: Sequence[str] = (), command: Sequence[str] = CHILD):
        super().__init__(to, seconds=0.05)
        self.jobs, self.gpus, self.command = jobs, gpus, command
        self.running: dict[str, LocalJob] = {}
        self.peak = 0.0

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Look at the memory that finished runs needed; end the processes at the end."""
        for folder in self.to.iterdir():
            self._note_memory(RunFolder(folder))
        try:
            yield
        finally:
            for job in self.running.values():
                job.close()
            for job in self.running.values():
                try:
                    job.process.wait(timeout=10)
                except subprocess.TimeoutExpired:
                    job.process.kill()
                    job.process.wait()

    def has_room(self) -> bool:
        """Whether there is a free place, and memory for another run as large as those so far."""
        return len(self.running) < self.jobs and self._is_room(psutil.virtual_memory().available)

    def _is_room(self, available: int) -> bool:
        return not self.running or bool(self.gpus) or available > 1e6 * self.peak

    def start(self, work: Work) -> str:
        """Start a process."""
        taken = [job.gpu for job in self.running.values()]
        gpu = min(self.gpus, key=taken.count) if len(self.gpus) > 1 else None
        environment = os.environ | {"PYTHONUNBUFFERED": "1"} | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu})
        function = f"{work.function.__module__}:{work.function.__name__}"
        folder = RunFolder(self.to / work.name)
        step = folder.last_step() if folder.path.is_dir() else None
        with open_log(self.log(work.name)) as log:
            process = subprocess.Popen(
                [*self.command, function, json.dumps(work.arguments)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                # Ctrl-C is for this process, which ends the others.
                start_new_session=True,
            )
        self.running[work.name] = LocalJob(process, gpu)
        return "starts" if step is None else f"goes on after step {step}"

    def ended(self, running: Mapping[str, Work]) -> list[Failure]:
        """The runs whose process has ended; one that was killed, or had no memory left, is lost."""
        failures = []
        for name, job in list(self.running.items()):
            if (code := job.process.poll()) is not None:
                self.running.pop(name).close()
                self._note_memory(RunFolder(self.to / name))
                failures.append(Failure(name, _ending(code), self.log(name), code < 0 or code == OUT_OF_MEMORY))
        return failures

    def _note_memory(self, run: RunFolder) -> None:
        """Note the memory that a run needed, if it is finished."""
        if run.is_finished:
            # NaN, where it was not measured, is not larger.
            self.peak = max(self.peak, peak_memory(run))


def _ending(code: int) -> str:
    if code == OUT_OF_MEMORY:
        return "no memory was left"
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"
