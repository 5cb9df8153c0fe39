"""A process for one engine: it loads the engine, and makes a call for each request, with nothing else beside it.

Requests and answers go over a pipe. Between its calls a process sleeps; threads of an engine that wait actively do so
for some milliseconds. A call's memory is the peak of the process in the call, beyond what it held just before its
first call, after loading; where the system cannot begin a new peak (not Linux), loading is part of it.
"""

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

from nystrom_lab.measure.memory import begin_peak, held_resident, peak_resident
from nystrom_papers.bench.engine_kinds import ENGINES, EngineJob

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Float

_THREADS = "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"
# Seconds that a process has to end by itself.
_PATIENCE = 10.0


class Called(NamedTuple):
    """A call of an engine: its seconds, the peak memory in MB, and the hidden states of the first call."""

    seconds: float
    beyond: float  # The peak of the call beyond what the process held before its first
    whole: float  # The peak of the process since it began
    states: "Float[np.ndarray, 'n w'] | None" = None


def _serve(pipe: Connection, name: str, job: EngineJob) -> None:
    # The process that waits for this one handles an interruption.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Progress bars of many processes; what ends an engine goes over the pipe.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    os.close(nowhere)
    # Libraries read them when they are loaded.
    os.environ.update(dict.fromkeys(_THREADS, str(job.threads)))
    try:
        call = ENGINES[name].load(job)
        loading, before = peak_resident(), 0.0
        pipe.send("")
        is_first = True
        while _is_asked(pipe):
            if is_first:
                before = held_resident()
            begin_peak()
            begun = perf_counter()
            states = call()
            seconds, peak = perf_counter() - begun, peak_resident()
            pipe.send(Called(seconds, peak - before, max(loading, peak), states if is_first else None))
            is_first = False
    except Exception as error:  # noqa: BLE001 (whatever ends one engine, the others go on)
        pipe.send(line_of(error))


def _is_asked(pipe: Connection) -> bool:
    """Wait for a request; False where the process that asks has ended."""
    try:
        return pipe.recv()
    except EOFError:
        return False


def line_of(error: Exception) -> str:
    """An error in one line, for a note."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200].rstrip('.')}" if lines else type(error).__name__


@dataclass
class EngineProcess:
    """The process of one engine, and why it takes no more requests; "" while it does."""

    name: str
    fault: str = ""
    _process: BaseProcess | None = None
    _pipe: Connection | None = field(default=None, repr=False)

    def wait(self) -> None:
        """Wait until the engine is loaded."""
        if self._pipe is not None and not self.fault:
            self._receive()

    def call(self) -> Called | None:
        """Make one call; None if the engine fails, and `fault` then says why."""
        if self._pipe is None or self.fault:
            return None
        self._pipe.send(True)
        return self._receive()

    def _receive(self) -> Called | None:
        assert self._pipe is not None
        assert self._process is not None
        try:
            told = self._pipe.recv()
        except (EOFError, ConnectionError):
            self._process.join(_PATIENCE)
            self.fault = f"its process ended with code {self._process.exitcode}, perhaps for lack of memory"
            return None
        if isinstance(told, Called):
            return told
        self.fault = told
        return None


@contextmanager
def engine_process(name: str, job: EngineJob) -> Iterator[EngineProcess]:
    """Context in which the process of an engine runs; it has ended afterwards."""
    # A fresh process: a fork would share what this one has loaded.
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, name, job))
    process.start()
    # The process has its own; with this one open, its end would not be seen.
    theirs.close()
    try:
        yield EngineProcess(name, _process=process, _pipe=ours)
    finally:
        ours.close()
        process.join(_PATIENCE / 100)
        process.terminate()
        process.join(_PATIENCE)
