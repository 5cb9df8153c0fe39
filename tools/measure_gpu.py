"""All that a GPU is to be measured on, in order: `make gpu`, or `python tools/measure_gpu.py --to runs/gpu`.

The steps are those of `STEPS`: the tests that need a GPU, tile sizes, tables of time and memory, errors, training
steps, and real runs. Each is a process of its own, with its output in TO/NAME.log and its rows in TO/NAME; a step that
ended well leaves TO/NAME.done. The same command goes on with the steps that are left, and an interrupted table or run
goes on where it was. No step begins that would not end in the minutes that are left, and none goes on beyond them. One
that fails is named at the end, and does not keep the others from running; rows without a value are printed with what
they say. The package need not be installed: the steps find it in src.

All but the last fit into 40 minutes; that one trains on data/text, which `nystrom data prepare text` makes.
"""

import argparse
import csv
import importlib.util
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

# Places in a command for the folder of the step and for this Python.
_FOLDER, _PYTHON = "{to}", sys.executable
_NYSTROM = (_PYTHON, "-m", "nystrom_lab")
_LENGTHS = ("1024", "2048", "4096", "8192", "16384", "32768", "65536")
_SOURCES = Path(__file__).resolve().parents[1] / "src"
# Seconds that an interrupted step has to say how far it was.
_GRACE = 10
_PEERS = ("nystrom-attention-64",) if importlib.util.find_spec("nystrom_attention") else ()


class Step(NamedTuple):
    """One step.

    Attributes:
        name: Its name, that of its folder.
        minutes: About how long it takes on an H200; it is ended after half as long again.
        words: The command; {to} is the folder of the step.
        resumes: Words that are added where its folder holds a run already.
    """

    name: str
    minutes: float
    words: tuple[str, ...]
    resumes: tuple[str, ...] = ()


def _efficiency(name: str, minutes: float, *words: str) -> Step:
    return Step(name, minutes, (*_NYSTROM, "bench", "efficiency", "--device", "cuda", *words, "--to", _FOLDER))


def _tiles(name: str, *words: str) -> Step:
    return Step(f"tiles-{name}", 2, (_PYTHON, "tools/tune_tiles.py", *words))


def _tests(name: str, minutes: float, *words: str) -> Step:
    """Tests; what other versions than those they are written for warn of is no error."""
    command = (_PYTHON, "-m", "pytest", "-m", "gpu", "-q", "-W", "default", "-p", "no:cacheprovider")
    return Step(f"tests-{name}", minutes, (*command, *words))


def _kernels(dtype: str, lengths: Sequence[str], minutes: float) -> list[Step]:
    """The shapes that the kernels are held to, beside plain PyTorch and fused exact attention."""
    of = ("--dtype", dtype, "--skip", "both", "--repeats", "15")
    methods = ("softmax", "nystrom-64", "nystrom-triton-64", "near_far", "near_far-triton")
    return [
        _efficiency(
            f"kernels-16384-{dtype}", 1.5, "--batch", "4", "--heads", "16", "--width", "128", "--lengths", "16384",
            "--methods", *methods, "nystrom-compiled-64", *of,
        ),
        _efficiency(
            f"kernels-lengths-{dtype}", minutes, "--batch", "8", "--lengths", *lengths, "--methods", *methods, *of,
        ),
    ]  # fmt: skip


_TIMED = ("measure", "studies/speed", "tools/test_tune_tiles.py")


def _run(task: str, method: str, minutes: float, *words: str) -> Step:
    command = (*_NYSTROM, "train", task, "--attention", method, "--preset", "nystromformer", "--device", "cuda")
    return Step(f"train-{task}-{method}", minutes, (*command, *words, "--to", _FOLDER), resumes=("--resume",))


STEPS = (
    # Most of their time is the compiler's.
    _tests("kernels", 4, "-n", "8", "tests/nystrom/gpu"),
    *_kernels("bfloat16", _LENGTHS, 3),
    Step("errors", 1, (_PYTHON, "tools/gpu_errors.py", "--to", f"{_FOLDER}/errors.csv")),
    _tiles("16384", "--width", "128"),
    _tiles("8192", "--batch", "8", "--heads", "8", "--tokens", "8192"),
    # Beyond, exact attention alone takes minutes a length.
    *_kernels("float32", _LENGTHS[:5], 2),
    _efficiency(
        "table-1", 2, "--methods", "softmax-materialised", "softmax", "linformer-256", "longformer-257", "nystrom-64",
        "nystrom-32", "nystrom-triton-64", "nystrom-triton-32", *_PEERS, "near_far", "near_far-triton",
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
    _tests("times", 3, "tests/nystrom/test_clock.py", *(f"tests/nystrom_lab/{each}" for each in _TIMED)),
    _run("listops", "nystrom", 3),
    _run("listops", "softmax", 4),
    _run("listops", "skyformer", 4),
    _run("text", "nystrom", 15, "--options.backend", "triton"),
)  # fmt: skip


def measure(
    steps: Sequence[Step],
    to: Path,
    *,
    minutes: float,
    clock: Callable[[], float] = time.monotonic,
    after: Callable[[], None] = lambda: None,
) -> tuple[list[str], list[str]]:
    """Run the steps that are left, as long as there is time.

    Args:
        steps: The steps, in order.
        to: The folder of all of them.
        minutes: Time for all steps together.
        clock: Seconds.
        after: Called after each step.

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
        words += step.resumes if (folder / "run.json").exists() else ()
        began = clock()
        code = _run_for(words, to / f"{step.name}.log", min(90 * step.minutes, end - began))
        if code == 0:
            done.touch()
        else:
            failed.append(step.name)
        state = "done" if code == 0 else "out of time" if code is None else f"exit code {code}"
        print(f"{step.name}: {state}, {clock() - began:.0f} s", flush=True)
        for note in dict.fromkeys(_notes(folder)):
            print(f"  {note}", flush=True)
        after()
    return failed, left


def _run_for(words: Sequence[str], log: Path, seconds: float) -> int | None:
    """The exit code of a command; None where it had to be ended."""
    path = os.pathsep.join([str(_SOURCES), *filter(None, [os.environ.get("PYTHONPATH")])])
    with (
        log.open("ab") as file,
        subprocess.Popen(
            words,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONPATH": path},
            # What a shell starts in the background ignores the signal, and so would its children.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        ) as process,
    ):
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
        try:
            process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
    return None


def _notes(folder: Path) -> Iterator[str]:
    """What rows without a value say."""
    for path in sorted(folder.glob("*.csv")):
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                if row.get("note") and row.get("value") in ("", "nan"):
                    yield f"{row.get('method')}, n={row.get('n')}: {row['note']}"


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
    after = (lambda: None) if asked.pack is None else partial(pack, asked.to, asked.pack)
    failed, left = measure(STEPS, asked.to, minutes=asked.minutes, after=after)
    after()
    for name, what in ((failed, "failed, see its log"), (left, "left for the next call")):
        for each in name:
            print(f"{each}: {what}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
