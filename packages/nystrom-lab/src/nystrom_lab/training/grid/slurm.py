"""SLURM jobs, through submitit: one for each piece of work, whose name is that of the folder and the piece.

    FOLDER/NAME.log      output of the job of a piece
    FOLDER/.slurm/       submitit's own files

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
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from nystrom.whole_files import check_no_link
from nystrom_lab.config import Slurm
from nystrom_lab.training.grid.processes import Failure, open_log
from nystrom_lab.training.grid.table import last_line
from nystrom_lab.training.run_folder import alone

PRIVATE = ".slurm"
# "GONE" is a job that SLURM no longer knows.
_ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY", "DEADLINE"}
_ENDED |= {"PREEMPTED", "GONE"}
_GONE = ("-", "GONE")


class Work(NamedTuple):
    """A piece of work for one job.

    Attributes:
        name: Name of its log.
        function: A function of a module.
        arguments: Plain values.
        result: Its result in words, by its files; "" if it is not done.
    """

    name: str
    function: Callable[..., object]
    arguments: Sequence[object]
    result: Callable[[], str]


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
        """The same call again."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, *arguments)


class Jobs:
    """The jobs of a folder.

    Args:
        to: The folder; all machines of the cluster see it.
        at_once: Maximum number of parallel jobs; None for as many as the cluster starts.

    Raises:
        ValueError: submitit is not installed, or SLURM is missing or rejects such a job.
    """

    def __init__(self, to: Path, asked: Slurm, *, cpus: int, at_once: int | None, seconds: float = 10.0):
        self.to, self.asked, self.at_once, self.seconds = to.resolve(), asked, at_once, seconds
        self.flags = asked.flags(cpus)
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

    def run(self, works: Sequence[Work]) -> list[Failure]:
        """Submit the pieces that are neither done nor in the queue, and wait for all.

        Returns:
            The pieces that are not done.

        Raises:
            ValueError: Another process is waiting for the jobs of this folder, or SLURM does not answer or rejects the
                jobs.
        """
        folder = self.to / PRIVATE
        folder.mkdir(mode=0o700, exist_ok=True)
        folder.chmod(0o700)
        with alone(folder, "command that waits for these jobs"):
            states, left, new = queue(self.to), dict[str, Work](), list[Work]()
            for work in works:
                job, state = states.get(work.name, _GONE)
                if result := work.result():
                    print(f"{work.name}: finished before: {result}", flush=True)
                    continue
                left[work.name] = work
                if state in _ENDED:
                    check_no_link(self.to / f"{work.name}.log")
                    new.append(work)
                else:
                    print(f"{work.name}: in job {job}", flush=True)
            if new:
                self._submit(new)
            try:
                return self._wait(left, len(works))
            except KeyboardInterrupt:
                print("\nThe jobs go on, and the same command waits for them; `scancel` ends them.")
                raise

    def _submit(self, works: Sequence[Work]) -> None:
        import submitit
        from submitit.core.utils import FailedSubmissionError, UncompletedJobError

        executor = submitit.SlurmExecutor(self.to / PRIVATE, max_num_timeout=self.asked.timeouts)
        jobs: list[str] = []
        for work in works:
            # Each waits for the one that many places before it.
            first = jobs[-self.at_once] if self.at_once and len(jobs) >= self.at_once else None
            executor.update_parameters(
                job_name=_prefix(self.to) + work.name,
                time=self.asked.time,
                signal_delay_s=min(90, 30 * self.asked.time),
                dependency=first and f"afterany:{first}",
                additional_parameters=self.flags,
            )
            call = LoggedCall(work.function, self.to / f"{work.name}.log")
            try:
                jobs.append(executor.submit(call, *work.arguments).job_id)
            except (FailedSubmissionError, UncompletedJobError) as error:
                raise ValueError(f"SLURM took no job of {self.to} ({' '.join(str(error).split())}).") from error
            print(f"{work.name}: submitted as job {jobs[-1]}", flush=True)

    def _wait(self, left: dict[str, Work], total: int) -> list[Failure]:
        failures, ended, silent = list[Failure](), set[str](), False
        while left:
            time.sleep(self.seconds)
            try:
                states = queue(self.to)
            except ValueError as error:
                if not silent:
                    print(f"{error} Waiting until it answers.", flush=True)
                silent = True
                continue
            # Files of another machine may be seen late, so the second look at a job that ended counts.
            before, silent = ended, False
            ended = {name for name in left if states.get(name, _GONE)[1] in _ENDED}
            for name, work in list(left.items()):
                if result := work.result():
                    del left[name]
                    print(f"{name}: {result} ({total - len(left) - len(failures)} of {total})", flush=True)
                elif name in ended & before:
                    del left[name]
                    log, (job, state) = self.to / f"{name}.log", states.get(name, _GONE)
                    reason = ": ".join(filter(None, [f"job {job} ended with {state}", last_line(log)]))
                    failures.append(Failure(name, reason, log))
                    print(f"{name}: failed, {reason}", flush=True)
        return failures


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
    """What the names of the jobs of a folder begin with."""
    return f"nystrom-{hashlib.sha256(str(to.resolve()).encode()).hexdigest()[:12]}-"
