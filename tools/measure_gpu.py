"""All that a GPU is to be measured on, in order: `make gpu`, or `python tools/measure_gpu.py --to runs/gpu`.

The steps are those of `STEPS`: the tests that need a GPU, tile sizes, tables of time and memory, errors, training
steps, and real runs. Each is a process of its own, with its output in TO/NAME.log and its rows in TO/NAME; a step that
ended well leaves TO/NAME.done. The same command goes on with the steps that are left, and an interrupted table or run
goes on where it was. No step begins that would not end in the minutes that are left. One that fails is named at the
end, and does not keep the others from running.

All but the last fit into 40 minutes; that one trains on data/text, which `nystrom data prepare text` makes.
"""

import argparse
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

# Places in a command for the folder of the step and for this Python.
_FOLDER, _PYTHON = "{to}", sys.executable
_NYSTROM = (_PYTHON, "-m", "nystrom")
_LENGTHS = ("1024", "2048", "4096", "8192", "16384", "32768", "65536")


class Step(NamedTuple):
    """One step.

    Attributes:
        name: Its name, that of its folder.
        minutes: About how long it takes on an H200; it is ended after half as long again.
        words: The command; {to} is the folder of the step.
        resumes: Word that is added where its folder is there already.
    """

    name: str
    minutes: float
    words: tuple[str, ...]
    resumes: tuple[str, ...] = ()


def _efficiency(name: str, minutes: float, *words: str) -> Step:
    return Step(name, minutes, (*_NYSTROM, "bench", "efficiency", "--device", "cuda", *words, "--to", _FOLDER))


def _tiles(name: str, *words: str) -> Step:
    return Step(f"tiles-{name}", 2, (_PYTHON, "tools/tune_tiles.py", *words))


def _kernels(dtype: str) -> list[Step]:
    """The shapes that the kernels are held to, beside plain PyTorch and fused exact attention."""
    of = ("--dtype", dtype, "--skip", "both", "--repeats", "15")
    methods = ("softmax", "nystrom-64", "nystrom-triton-64", "nystrom-compiled-64", "near_far", "near_far-triton")
    return [
        _efficiency(
            f"kernels-16384-{dtype}", 1.5, "--batch", "4", "--heads", "16", "--width", "128", "--lengths", "16384",
            "--methods", *methods, *of,
        ),
        _efficiency(f"kernels-lengths-{dtype}", 3, "--batch", "8", "--lengths", *_LENGTHS, "--methods", *methods, *of),
    ]  # fmt: skip


def _run(task: str, method: str, minutes: float, *words: str) -> Step:
    command = (*_NYSTROM, "train", task, "--attention", method, "--preset", "nystromformer", "--device", "cuda")
    return Step(f"train-{task}-{method}", minutes, (*command, *words, "--to", _FOLDER), resumes=("--resume",))


STEPS = (
    Step("tests", 5, (_PYTHON, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider")),
    *_kernels("bfloat16"),
    Step("errors", 1, (_PYTHON, "tools/gpu_errors.py", "--to", f"{_FOLDER}/errors.csv")),
    _tiles("16384", "--width", "128"),
    _tiles("8192", "--batch", "8", "--heads", "8", "--tokens", "8192"),
    *_kernels("float32"),
    _efficiency(
        "table-1", 2, "--methods", "softmax-materialised", "softmax", "linformer-256", "longformer-257", "nystrom-64",
        "nystrom-32", "nystrom-triton-64", "nystrom-triton-32", "nystrom-attention-64", "near_far", "near_far-triton",
        "--lengths", "512", "1024", "2048", "4096", "8192", "--skip", "both",
    ),
    Step(
        "table-2", 3,
        (*_NYSTROM, "bench", "training", "--device", "cuda", "--precision", "bfloat16", "--to", _FOLDER),
    ),
    Step(
        "model", 1.5,
        (*_NYSTROM, "bench", "model", "--device", "cuda", "--dtype", "bfloat16", "--methods", "softmax", "nystrom-64",
         "--to", _FOLDER),
    ),
    _run("listops", "nystrom", 4),
    _run("listops", "softmax", 5),
    _run("listops", "skyformer", 5),
    _run("text", "nystrom", 15, "--options.backend", "triton"),
)  # fmt: skip


def measure(
    steps: Sequence[Step], to: Path, *, minutes: float, clock: Callable[[], float] = time.monotonic
) -> tuple[list[str], list[str]]:
    """Run the steps that are left, as long as there is time.

    Args:
        steps: The steps, in order.
        to: The folder of all of them.
        minutes: Time for all steps together.
        clock: Seconds.

    Returns:
        The names of the steps that failed now, and of those for which there was no time.
    """
    end, failed, left = clock() + 60 * minutes, [], []
    to.mkdir(parents=True, exist_ok=True)
    for step in steps:
        done, folder = to / f"{step.name}.done", to / step.name
        if done.exists():
            continue
        if clock() + 60 * step.minutes > end:
            left.append(step.name)
            continue
        words = [word.replace(_FOLDER, str(folder)) for word in step.words]
        words += step.resumes if folder.exists() else ()
        began = clock()
        with (to / f"{step.name}.log").open("ab") as log:
            try:
                code = subprocess.run(
                    words, stdout=log, stderr=subprocess.STDOUT, timeout=90 * step.minutes, check=False
                ).returncode
            except subprocess.TimeoutExpired:
                code = -1
        if code == 0:
            done.touch()
        else:
            failed.append(step.name)
        state = "done" if code == 0 else "out of time" if code == -1 else f"exit code {code}"
        print(f"{step.name}: {state}, {clock() - began:.0f} s", flush=True)
    return failed, left


def pack(to: Path, file: Path) -> None:
    """Put the logs, rows, curves and figures of all steps into one archive, without checkpoints and models."""
    with tarfile.open(file, "w:gz") as archive:
        for path in sorted(to.rglob("*")):
            if path.suffix in (".log", ".csv", ".json", ".png", ".done", ".tsv") and "checkpoint" not in str(path):
                archive.add(path, path.relative_to(to.parent))


def main() -> int:
    """Measure, and say what is left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=Path("runs/gpu"), help="folder of logs and rows")
    parser.add_argument("--minutes", type=float, default=40, help="time for all steps together")
    parser.add_argument("--pack", type=Path, help="archive to write logs and rows to, .tar.gz")
    parser.add_argument("--list", action="store_true", help="print the steps, and which are done")
    asked = parser.parse_args()
    if asked.list:
        for step in STEPS:
            state = "done" if (asked.to / f"{step.name}.done").exists() else f"about {step.minutes:g} min"
            print(f"{step.name:28} {state}")
        return 0
    failed, left = measure(STEPS, asked.to, minutes=asked.minutes)
    if asked.pack is not None:
        pack(asked.to, asked.pack)
    for name, what in ((failed, "failed, see its log"), (left, "left for the next call")):
        for each in name:
            print(f"{each}: {what}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
