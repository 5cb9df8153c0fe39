"""SLURM jobs, through submitit: an array with one job for each piece of work.

    FOLDER/NAME.log      output of the job of a piece
    FOLDER/.slurm/       jobs.json, the job of each piece; submitit's own files

submitit stores pickles, and loading a pickle can run code: only the user can access its folder. A piece is a function
of a module with plain arguments, which can resume; its own files show whether it is done, and `squeue` shows which jobs
are alive. A job that is preempted or reaches its time limit is requeued; one whose node failed or that was killed is
resubmitted once. Jobs outlive the process that submitted them: the next process with this folder waits for them.
"""

import hashlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock, Timeout

from nystrom.whole_files import check_no_link, write_whole
from nystrom_lab.training.grid.processes import Failure
from nystrom_lab.training.grid.request import Slurm
from nystrom_lab.training.grid.table import last_line

PRIVATE = ".slurm"
_ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY", "DEADLINE"}
_ENDED |= {"PREEMPTED"}
# Ends that say nothing of the work; "GONE" is a job that SLURM no longer knows.
_ONCE_MORE = {"NODE_FAIL", "BOOT_FAIL", "PREEMPTED", "TIMEOUT", "GONE"}


class Work(NamedTuple):
    """A piece of work for one job.

    Attributes:
        name: Name of its log.
        function: A function of a module.
        arguments: Plain values.
        is_done: Whether it is done, according to its files.
    """

    name: str
    function: Callable[..., object]
    arguments: Sequence[object]
    is_done: Callable[[], bool]


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
        self.to, self.asked, self.cpus, self.at_once, self.seconds = to.resolve(), asked, cpus, at_once, seconds
        if find_spec("submitit") is None:
            raise ValueError("on is 'slurm', but submitit is not installed: pip install 'nystrom-lab[cluster]'.")
        if missing := [word for word in ("sbatch", "squeue", "srun") if shutil.which(word) is None]:
            raise ValueError(
                f"on is 'slurm', but there is no {missing[0]} here: start it on a machine of a SLURM cluster, or use "
                "--on local."
            )
        flags = [f"--{name}" if value is True else f"--{name}={value}" for name, value in asked.flags(cpus).items()]
        test = subprocess.run(
            ["sbatch", "--test-only", *flags, "--wrap=true"], capture_output=True, text=True, check=False
        )
        if test.returncode:
            said = "; ".join(line.removeprefix("sbatch: error: ") for line in test.stderr.splitlines() if line.strip())
            raise ValueError(f"SLURM refuses a job with {' '.join(flags)} ({said}): change the options --slurm.")

    def run(self, works: Sequence[Work], finished: Callable[[Work], str]) -> list[Failure]:
        """Submit the pieces that are neither done nor in the queue, and wait for all.

        Args:
            works: The pieces.
            finished: Function that describes a finished piece, for printing.

        Returns:
            The pieces that are not done.

        Raises:
            ValueError: Another process is waiting for the jobs of this folder, or SLURM does not answer or rejects the
                jobs.
        """
        folder = self.to / PRIVATE
        folder.mkdir(mode=0o700, exist_ok=True)
        folder.chmod(0o700)
        try:
            with FileLock(folder / ".lock", timeout=0):
                return self._run(works, finished)
        except Timeout:
            raise ValueError(f"{self.to} is in use by a command that waits for its jobs: wait for that one.") from None

    def _run(self, works: Sequence[Work], finished: Callable[[Work], str]) -> list[Failure]:
        left = {work.name: work for work in works if not work.is_done()}
        for work in works:
            if work.name not in left:
                print(f"{work.name}: finished before: {finished(work)}", flush=True)
        ids, alive = jobs_of(self.to), alive_jobs(self.to)
        if strange := sorted(alive - set(ids.values())):
            raise ValueError(
                f"{self.to} has jobs whose submission was interrupted: `scancel {' '.join(strange)}`, and start again."
            )
        for name in [name for name in left if ids.get(name) in alive]:
            print(f"{name}: in job {ids[name]}", flush=True)
        self._submit([work for work in left.values() if ids.get(work.name) not in alive])
        try:
            return self._wait(left, len(works), finished)
        except KeyboardInterrupt:
            print("\nThe jobs go on, and the same command waits for them; `scancel` ends them.")
            raise

    def _wait(self, left: dict[str, Work], total: int, finished: Callable[[Work], str]) -> list[Failure]:
        ids, failures = jobs_of(self.to), list[Failure]()
        ended, tried, silent = set[str](), set[str](), False
        while left:
            time.sleep(self.seconds)
            try:
                states = queue(self.to)
            except ValueError as error:
                if not silent:
                    print(f"{error} Waiting until it answers.", flush=True)
                silent = True
                continue
            silent, again = False, []
            for name, work in list(left.items()):
                state = states.get(ids[name], "GONE")
                if work.is_done():
                    del left[name]
                    print(f"{name}: {finished(work)} ({total - len(left) - len(failures)} of {total})", flush=True)
                elif state in _ENDED | {"GONE"} and name not in ended:
                    # Files of another machine may be seen late.
                    ended.add(name)
                elif name in ended:
                    ended.discard(name)
                    if name not in tried and self._is_lost(ids[name], state):
                        tried.add(name)
                        again.append(work)
                        print(f"{name}: job {ids[name]} ended with {state}; submitted once more", flush=True)
                    else:
                        del left[name]
                        failures.append(self._failure(name, ids[name], state))
            self._submit(again)
            ids = jobs_of(self.to)
        return failures

    def _is_lost(self, job: str, state: str) -> bool:
        """Whether a job ended for a reason outside of its work, without leaving a result."""
        result = self.to / PRIVATE / f"{job}_0_result.pkl"
        return state in _ONCE_MORE or (state in ("FAILED", "COMPLETED") and not result.exists())

    def _failure(self, name: str, job: str, state: str) -> Failure:
        log = self.to / f"{name}.log"
        last = last_line(log)
        failure = Failure(name, f"job {job} ended with {state}{f': {last}' if last else ''}", log)
        print(f"{name}: failed, {failure.reason}", flush=True)
        return failure

    def _submit(self, works: Sequence[Work]) -> None:
        """Submit pieces as one array, and record their jobs."""
        if not works:
            return
        for work in works:
            check_no_link(self.to / f"{work.name}.log")
        import submitit
        from submitit.core.utils import FailedSubmissionError, UncompletedJobError

        from nystrom_lab.training.grid.job import LoggedCall

        folder = self.to / PRIVATE
        executor = submitit.SlurmExecutor(folder, max_num_timeout=self.asked.timeouts)
        executor.update_parameters(
            job_name=_job_name(self.to),
            time=self.asked.time,
            signal_delay_s=min(90, 30 * self.asked.time),
            array_parallelism=self.at_once or len(works),
            additional_parameters=self.asked.flags(self.cpus),
        )
        try:
            with executor.batch():
                jobs = [
                    executor.submit(LoggedCall(work.function, self.to / f"{work.name}.log"), *work.arguments)
                    for work in works
                ]
        except (FailedSubmissionError, UncompletedJobError) as error:
            raise ValueError(f"SLURM took no job of {self.to} ({' '.join(str(error).split())}).") from error
        ids = dict(jobs_of(self.to)) | {work.name: job.job_id for work, job in zip(works, jobs, strict=True)}
        write_whole(folder / "jobs.json", json.dumps(ids, indent=1) + "\n")
        for work in works:
            print(f"{work.name}: submitted as job {ids[work.name]}", flush=True)


def jobs_of(to: Path) -> Mapping[str, str]:
    """The last job of each piece that was submitted in a folder."""
    file = to / PRIVATE / "jobs.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


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
