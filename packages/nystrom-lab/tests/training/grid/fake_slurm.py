"""A cluster of one machine, as the programs of SLURM that a grid calls: enough of them to run its jobs, and no queue.

The state of a job is a file in the folder FAKE_SLURM; a job runs at once, in a process of its own.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

STATES = Path(os.environ["FAKE_SLURM"])


def sbatch(words: list[str]) -> None:
    text = " ".join(words) if "--test-only" in words else Path(words[0]).read_text()
    if "--partition=none" in text:
        sys.exit("sbatch: error: invalid partition specified: none")
    if "--test-only" in words:
        return
    job = str(len([path for path in STATES.iterdir() if path.name.endswith(".name")]) + 1)
    (STATES / f"{job}.name").write_text(re.search(r"--job-name=(\S+)", text)[1])
    (STATES / f"{job}.state").write_text("RUNNING")
    nothing, here = subprocess.DEVNULL, os.environ | {"SLURM_JOB_ID": job}
    command = [sys.executable, __file__, "run", job, words[0]]
    subprocess.Popen(command, env=here, start_new_session=True, stdout=nothing, stderr=nothing)
    print(f"Submitted batch job {job}")


def run(words: list[str]) -> None:
    job, script = words
    done = subprocess.run(["bash", script], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    # A state is never seen half written.
    (STATES / f"{job}.next").write_text("FAILED" if done.returncode else "COMPLETED")
    (STATES / f"{job}.next").replace(STATES / f"{job}.state")


def srun(words: list[str]) -> None:
    # --unbuffered --output FILE --error FILE COMMAND
    os.execvp(words[5], words[5:])


def squeue(words: list[str]) -> None:
    if (STATES / "silent").exists():
        sys.exit("slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
    for state in sorted(STATES.glob("*.state"), key=lambda path: int(path.stem)):
        print(state.stem, state.read_text(), state.with_suffix(".name").read_text())


if __name__ == "__main__":
    globals()[sys.argv[1]](sys.argv[2:])
