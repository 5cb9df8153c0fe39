"""SLURM jobs, through submitit: one for each piece of work, whose name is that of the folder and the piece.

    FOLDER/.slurm/    submitit's own files

submitit stores pickles, and loading a pickle can run code: only the user can access its folder. A piece is a function
of a module with plain arguments, which can resume; its own files show whether it is done, and `squeue` shows which jobs
there are (submitit asks `sacct`, which not every cluster has, and waits for ever without it). A job that is preempted,
reaches its time limit or loses its node is requeued. Jobs outlive the process that submitted them: the next process
with this folder waits for them.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nystrom_lab.config import Slurm
from nystrom_lab.training.grid.scheduler import Failure, Scheduler, Work, open_log
from nystrom_lab.training.run_folder import alone

PRIVATE = ".slurm"
# "GONE" is a job that SLURM no longer knows.
_ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY", "DEADLINE"}
_ENDED |= {"PREEMPTED", "GONE"}
_GONE = ("-", "GONE")


class LoggedCall:
    """A function of a module, whose output in a job is added to a log.

    submitit catches the signal before preemption or the time limit, and requeues the job with what `checkpoint` gives.
    """

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

    def checkpoint(self, *arguments: object) -> Any:
        """The call that submitit submits in place of this one: the same once more."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, *arguments)


class Jobs(Scheduler):
    """The jobs of a folder.

    Args:
        to: The folder; all machines of the cluster see it.
        options: Resources of each job.
        at_once: Maximum number of parallel jobs; None for as many as the cluster starts.

    Raises:
        ValueError: submitit is not installed, or SLURM is missing or rejects such a job.
    """

    interrupted = ". The jobs go on, and the same command waits for them; `scancel` ends them."

    def __init__(self, to: Path, options: Slurm, *, cpus: int, at_once: int | None, seconds: float = 10.0):
        super().__init__(to.resolve(), seconds)
        self.options, self.at_once, self.flags = options, at_once, options.flags(cpus)
        self.states: dict[str, tuple[str, str]] = {}
        self.submitted: list[str] = []
        self.over: set[str] = set()
        self.silent = False
        if find_spec("submitit") is None:
            raise ValueError("on is 'slurm', but submitit is not installed: pip install 'nystrom-lab[cluster]'.")
        if missing := [word for word in ("sbatch", "squeue", "srun") if shutil.which(word) is None]:
            raise ValueError(
                f"on is 'slurm', but there is no {missing[0]} here: start it on a machine of a SLURM cluster, or use "
                "--on local."
            )
        flags = [f"--{name}" if value is True else f"--{name}={value}" for name, value in self.flags.items()]
        test = subprocess.run(["sbatch", "--test-only", *flags, "--wrap=true"], capture_output=True, text=True)
        if test.returncode:
            said = "; ".join(line.removeprefix("sbatch: error: ") for line in test.stderr.splitlines() if line.strip())
            raise ValueError(f"SLURM refuses a job with {' '.join(flags)} ({said}): change the options --slurm.")

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Make the folder of submitit, and lock it; the jobs go on at the end.

        Raises:
            ValueError: Another process is waiting for the jobs of this folder, or SLURM does not answer.
        """
        folder = self.to / PRIVATE
        folder.mkdir(mode=0o700, exist_ok=True)
        folder.chmod(0o700)
        with alone(folder, "command that waits for these jobs"):
            # Before any result is looked for: a piece that ends in between is not submitted again.
            self.states, self.submitted, self.over = queue(self.to), [], set()
            yield

    def has_room(self) -> bool:
        """All jobs are submitted; the cluster starts as many as it should."""
        return True

    def start(self, work: Work) -> str:
        """Submit a job, unless there is one.

        Raises:
            ValueError: SLURM rejects it.
        """
        job, state = self.states.get(work.name, _GONE)
        if state not in _ENDED:
            return f"in job {job}"
        import submitit
        from submitit.core.utils import FailedSubmissionError, UncompletedJobError

        # Each waits for the one that many places before it.
        waits = self.at_once and len(self.submitted) >= self.at_once
        executor = submitit.SlurmExecutor(self.to / PRIVATE, max_num_timeout=self.options.timeouts)
        executor.update_parameters(
            job_name=_prefix(self.to) + work.name,
            time=self.options.time,
            signal_delay_s=min(90, 30 * self.options.time),
            dependency=f"afterany:{self.submitted[-self.at_once]}" if self.at_once and waits else None,
            additional_parameters=self.flags,
        )
        try:
            job = executor.submit(LoggedCall(work.function, self.log(work.name)), *work.arguments).job_id
        except (FailedSubmissionError, UncompletedJobError) as error:
            raise ValueError(f"SLURM took no job of {self.to} ({' '.join(str(error).split())}).") from error
        self.submitted.append(job)
        return f"submitted as job {job}"

    def ended(self, running: Mapping[str, Work]) -> list[Failure]:
        """The pieces with a result, and those whose job has ended."""
        try:
            states = queue(self.to)
        except ValueError as error:
            if not self.silent:
                print(f"{error} Waiting until it answers.", flush=True)
            self.silent = True
            return []
        # Files of another machine may be seen late, so the second look at a job that ended counts.
        before, self.silent = self.over, False
        self.over = {name for name in running if states.get(name, _GONE)[1] in _ENDED}
        return [
            Failure(name, "job {} ended with {}".format(*states.get(name, _GONE)), self.log(name))
            for name, work in running.items()
            if name in self.over & before or work.result()
        ]


def queue(to: Path) -> dict[str, tuple[str, str]]:
    """The last job of each piece of a folder that SLURM still lists, and its state; none where there is no SLURM.

    Raises:
        ValueError: SLURM does not answer.
    """
    if not (to / PRIVATE).is_dir() or shutil.which("squeue") is None:
        return {}
    words = ["squeue", "--me", "--noheader", "--states=all", "--sort=i", "--format=%i %T %j"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=os.environ | {"LC_ALL": "C"})
    if done.returncode:
        raise ValueError(f"SLURM does not answer ({' '.join(done.stderr.split())}).")
    jobs, own = (line.split(maxsplit=2) for line in done.stdout.splitlines()), _prefix(to)
    return {name.removeprefix(own): (job, state) for job, state, name in jobs if name.startswith(own)}


def alive_jobs(to: Path) -> list[str]:
    """The pending and running jobs of a folder.

    Raises:
        ValueError: SLURM does not answer.
    """
    return [job for job, state in queue(to).values() if state not in _ENDED]


def check_no_jobs(to: Path) -> None:
    """Check that no job of a folder is pending or running, before doing its work here.

    Raises:
        ValueError: One is, or SLURM does not answer.
    """
    if alive := alive_jobs(to):
        raise ValueError(f"{to} is in use by jobs of SLURM ({' '.join(alive)}): add --on slurm, or scancel them.")


def _prefix(to: Path) -> str:
    """The beginning of the names of a folder's jobs."""
    return f"nystrom-{hashlib.sha256(str(to.resolve()).encode()).hexdigest()[:12]}-"
