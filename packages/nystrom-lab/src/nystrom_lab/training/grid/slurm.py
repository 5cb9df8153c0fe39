"""SLURM jobs, through submitit: an array with one job for each piece of work.

    FOLDER/NAME.log      output of the job of a piece
    FOLDER/.slurm/       jobs.json, the job of each piece; submitit's own files

submitit stores pickles, and loading a pickle can run code: only the user can access its folder. A piece is a function
of a module with plain arguments, which can resume; its own files show whether it is done, and `squeue` shows which jobs
are alive (submitit asks `sacct`, which not every cluster has, and waits for ever without it). A job that is preempted,
reaches its time limit or loses its node is requeued. Jobs outlive the process that submitted them: the next process
with this folder waits for them.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from nystrom.whole_files import check_no_link, write_whole
from nystrom_lab.config import Slurm
from nystrom_lab.training.grid.processes import Failure, open_log
from nystrom_lab.training.grid.table import last_line
from nystrom_lab.training.run_folder import alone

PRIVATE = ".slurm"
# "GONE" is a job that SLURM no longer knows.
_ENDED = [
    "COMPLETED",
    "FAILED",
    "CANCELLED",
    "TIMEOUT",
    "NODE_FAIL",
    "BOOT_FAIL",
    "OUT_OF_MEMORY",
    "DEADLINE",
    "PREEMPTED",
    "GONE",
]


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

    submitit catches the signal before preemption or the time limit, and requeues the job with what `checkpoint` gives;
    the function then continues from its last checkpoint.
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
        asked: Resources of each job.
        cpus: Cores of each job.
        at_once: Maximum number of parallel jobs; None for as many as the cluster starts.
        seconds: Seconds between checks of the queue.

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
            ids, alive, left = jobs_of(self.to), alive_jobs(self.to), dict[str, Work]()
            if strange := " ".join(sorted(alive - {*ids.values()})):
                raise ValueError(
                    f"{self.to} has jobs whose submission was interrupted: `scancel {strange}`, and start again."
                )
            for work in works:
                if result := work.result():
                    print(f"{work.name}: finished before: {result}", flush=True)
                    continue
                left[work.name] = work
                if ids.get(work.name) in alive:
                    print(f"{work.name}: in job {ids[work.name]}", flush=True)
            self._submit([work for work in left.values() if ids.get(work.name) not in alive])
            try:
                return self._wait(left, len(works))
            except KeyboardInterrupt:
                print("\nThe jobs go on, and the same command waits for them; `scancel` ends them.")
                raise

    def _wait(self, left: dict[str, Work], total: int) -> list[Failure]:
        ids, failures, ended, silent = jobs_of(self.to), list[Failure](), set[str](), False
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
            ended = {name for name in left if states.get(ids[name], "GONE") in _ENDED}
            for name, work in list(left.items()):
                if result := work.result():
                    del left[name]
                    print(f"{name}: {result} ({total - len(left) - len(failures)} of {total})", flush=True)
                elif name in ended & before:
                    del left[name]
                    log = self.to / f"{name}.log"
                    words = [f"job {ids[name]} ended with {states.get(ids[name], 'GONE')}", last_line(log)]
                    failures.append(Failure(name, ": ".join(filter(None, words)), log))
                    print(f"{name}: failed, {failures[-1].reason}", flush=True)
        return failures

    def _submit(self, works: Sequence[Work]) -> None:
        """Submit pieces as one array, and record their jobs."""
        if not works:
            return
        for work in works:
            check_no_link(self.to / f"{work.name}.log")
        import submitit
        from submitit.core.utils import FailedSubmissionError, UncompletedJobError

        executor = submitit.SlurmExecutor(self.to / PRIVATE, max_num_timeout=self.asked.timeouts)
        executor.update_parameters(
            job_name=_job_name(self.to),
            time=self.asked.time,
            signal_delay_s=min(90, 30 * self.asked.time),
            array_parallelism=self.at_once or len(works),
            additional_parameters=self.flags,
        )
        calls = [(LoggedCall(work.function, self.to / f"{work.name}.log"), work.arguments) for work in works]
        try:
            with executor.batch():
                jobs = [executor.submit(call, *arguments) for call, arguments in calls]
        except (FailedSubmissionError, UncompletedJobError) as error:
            raise ValueError(f"SLURM took no job of {self.to} ({' '.join(str(error).split())}).") from error
        ids = {work.name: job.job_id for work, job in zip(works, jobs, strict=True)}
        write_whole(self.to / PRIVATE / "jobs.json", json.dumps({**jobs_of(self.to), **ids}, indent=1) + "\n")
        for name, job in ids.items():
            print(f"{name}: submitted as job {job}", flush=True)


def jobs_of(to: Path) -> Mapping[str, str]:
    """The last job of each piece that was submitted in a folder.

    Raises:
        ValueError: The record of the jobs is damaged.
    """
    file = to / PRIVATE / "jobs.json"
    if not file.is_file():
        return {}
    jobs: Any = None
    with suppress(ValueError):
        jobs = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(jobs, dict):
        raise ValueError(f"{file} is damaged: move it away, and start the command of the folder again.")
    return jobs


def alive_jobs(to: Path) -> set[str]:
    """The pending and running jobs of a folder.

    Raises:
        ValueError: SLURM does not answer.
    """
    return {job for job, state in queue(to).items() if state not in _ENDED}


def check_no_jobs(to: Path) -> None:
    """Check that no job of a folder is pending or running, before doing its work here.

    Raises:
        ValueError: One is, or SLURM does not answer.
    """
    if (to / PRIVATE).is_dir() and shutil.which("squeue") and (alive := sorted(alive_jobs(to))):
        raise ValueError(f"{to} is in use by jobs of SLURM ({' '.join(alive)}): add --on slurm, or scancel them.")


def queue(to: Path) -> dict[str, str]:
    """The state of each job of a folder that SLURM still lists.

    Raises:
        ValueError: SLURM does not answer.
    """
    words = ["squeue", "--me", "--noheader", "--array", "--states=all", f"--name={_job_name(to)}", "--format=%i %T"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=os.environ | {"LC_ALL": "C"})
    if done.returncode:
        raise ValueError(f"SLURM does not answer ({' '.join(done.stderr.split())}).")
    return dict(line.split() for line in done.stdout.splitlines())


def _job_name(to: Path) -> str:
    return f"nystrom-{hashlib.sha256(str(to.resolve()).encode()).hexdigest()[:12]}"
