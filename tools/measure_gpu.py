"""All that a GPU is to be measured on, in order: `make gpu`, or `python tools/measure_gpu.py --to runs/gpu`.

The steps are those of `STEPS`, the most telling first: the tests that need a GPU, errors, tables of time and memory,
tile sizes, training steps, and real runs. Each is a process of its own, with its output in TO/NAME.log and its rows in
TO/NAME; a step that ended well leaves TO/NAME.done. The same command goes on with the steps that are left, and an
interrupted table or run goes on where it was. No step begins that would not end in the minutes that are left, and none
goes on beyond them. One that fails is named at the end, and does not keep the others from running; rows without a value
are printed with what they say.

Neither package need be installed: the steps find them. They need torch, Triton, transformers and what these need,
pytest with pytest-xdist and pytest-timeout, hypothesis, jaxtyping and psutil, but nothing that only the command line
needs. All but the last four fit into 25 minutes; the last trains on data/text, made by `nystrom data prepare text`.
"""

import argparse
import csv
import importlib
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

# The place in a command for the folder of the step.
_FOLDER, _PYTHON = "{to}", sys.executable
_ROOT = Path(__file__).resolve().parents[1]
# Seconds that an interrupted step has to say how far it was.
_GRACE = 10


class Step(NamedTuple):
    """One step.

    Attributes:
        name: Its name, that of its folder.
        minutes: About how long it takes on an H200; it is ended after half as long again.
        words: The command; {to} is the folder of the step.
        resumes: Words that are added where its folder holds a run already.
        calls: The function that the command calls, as "module:name"; "" if it is another program.
        given: Its arguments, but for the folder `to` and `resume`.
    """

    name: str
    minutes: float
    words: tuple[str, ...]
    resumes: tuple[str, ...] = ()
    calls: str = ""
    given: Mapping[str, Any] = {}

    def call(self, to: Path, *, resume: bool = False) -> Any:
        """Call the function of the step in this process.

        Args:
            to: Folder of its results.
            resume: Whether the folder holds a run to continue.
        """
        module, _, name = self.calls.partition(":")
        more = {"resume": True} if resume else {}
        return getattr(importlib.import_module(module), name)(**self.given, to=to, **more)


def _called(name: str, minutes: float, calls: str, *, resumes: tuple[str, ...] = (), **given: Any) -> Step:
    words = (_PYTHON, "tools/measure_gpu.py", "--step", name, "--to", _FOLDER)
    return Step(name, minutes, words, resumes, calls, given | {"device": "cuda"})


_efficiency = partial(_called, calls="nystrom_lab.bench.efficiency:run_efficiency")


def _program(name: str, minutes: float, tool: str) -> Step:
    return Step(name, minutes, (_PYTHON, f"tools/{tool}.py", "--to", f"{_FOLDER}/{name}.csv"))


def _tiles(name: str, **given: Any) -> Step:
    return _called(f"tiles-{name}", 2.5, "tools.tune_tiles:print_fastest", **given)


def _tests(name: str, minutes: float, *words: str) -> Step:
    """Tests; what other versions than those they are written for warn of is no error."""
    command = (_PYTHON, "-m", "pytest", "-m", "gpu", "-q", "-W", "default", "-p", "no:cacheprovider")
    return Step(f"tests-{name}", minutes, (*command, *words))


def _run(task: str, method: str, minutes: float, **given: Any) -> Step:
    calls, named = "nystrom_lab.training.train:train", {"attention": method, "preset": "nystromformer"}
    return _called(f"train-{task}-{method}", minutes, calls, resumes=("--resume",), task=task, **named, **given)


_LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
# Plain PyTorch, fused exact attention, and this library with and without its kernels.
_METHODS = (
    "softmax", "authors-64", "nystrom-64", "nystrom-triton-64", "near_far", "near_far-triton", "near_far-growing",
    "near_far-growing-triton", "skyformer-128", "skyformer-triton-128",
)  # fmt: skip
_LONG: dict[str, Any] = {"batch": 4, "heads": 16, "width": 128, "lengths": (16384,), "methods": _METHODS}
_EVERY: dict[str, Any] = {"batch": 8, "heads": 8, "width": 64, "methods": _METHODS, "repeats": 9}
# What `backend="auto"` does not rest on yet: one method beside its kernels, at few lengths.
_PAIRS = ("nystrom-64", "nystrom-triton-64", "near_far", "near_far-triton", "skyformer-128", "skyformer-triton-128")
_WIDER: dict[str, Any] = {"methods": _PAIRS, "lengths": (512, 4096, 16384), "skip": "without", "repeats": 9}
_TIMED = (
    "packages/nystrom/tests/test_clock.py",
    "packages/nystrom-lab/tests/measure/test_peak.py",
    "packages/nystrom-lab/tests/bench/test_floor.py",
)

STEPS = (
    # Most of the time of tests, errors and tiles is the compiler's.
    _tests("kernels", 3, "-n", "12", "packages/nystrom/tests/gpu"),
    _program("errors", 1.5, "gpu_errors"),
    _efficiency("16384-bfloat16", 1, **_LONG, dtype="bfloat16", skip="both", repeats=15),
    _efficiency("lengths-bfloat16", 3, **_EVERY, dtype="bfloat16", skip="both", lengths=_LENGTHS),
    # Beyond, exact attention alone takes minutes a length.
    _efficiency("lengths-float32", 1.5, **_EVERY, dtype="float32", skip="without", lengths=_LENGTHS[:5]),
    _efficiency("wider-float16", 0.5, **_WIDER, batch=8, heads=8, width=64, dtype="float16"),
    _efficiency("wider-128", 0.5, **_WIDER, batch=8, heads=8, width=128, dtype="bfloat16"),
    _efficiency("wider-single", 0.5, **_WIDER, batch=1, heads=8, width=64, dtype="bfloat16"),
    _tiles("nystrom", width=128, kernel_size=33),
    _tiles("near_far", method="near_far", batch=8, heads=8, tokens=8192),
    _called(
        "model", 1, "nystrom_lab.bench.model:run_model", dtype="bfloat16",
        methods=("softmax", "nystrom-64", "nystrom-triton-64", "near_far-triton"),
    ),
    _called("training", 2, "nystrom_lab.bench.training:run_training", precision="bfloat16"),
    _tests("times", 0.5, *_TIMED),
    _run("listops", "nystrom", 3),
    _tiles("skyformer", method="skyformer", landmarks=128, batch=8, heads=8, tokens=8192),
    _run("listops", "skyformer", 4),
    _run("listops", "softmax", 4),
    _run("text", "nystrom", 15, options={"backend": "triton"}),
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
        done, folder = to / f"{step.name}.done", (to / step.name).resolve()
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
    given = filter(None, [os.environ.get("PYTHONPATH")])
    path = os.pathsep.join([*map(str, _ROOT.glob("packages/*/src")), str(_ROOT), *given])
    with (
        log.open("ab") as file,
        subprocess.Popen(
            words,
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=_ROOT,
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


def _call(step: Step, to: Path, *, resume: bool) -> int:
    """Call the function of a step, and print its rows; a ValueError is one line."""
    try:
        found = step.call(to, resume=resume)
    except ValueError as error:
        print(f"{step.name}: {error}", file=sys.stderr)
        return 2
    for row in found if isinstance(found, list) else ():
        spread = "" if row.low is None else f"({row.low:.3f} to {row.high:.3f})"
        print(f"n={row.n} {row.method:28} {row.quantity:24} {row.value:10.3f} {row.unit} {row.note or spread}")
    return 0


def main() -> int:
    """Measure, and say what is left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=Path("runs/gpu"), help="folder of logs and rows")
    parser.add_argument("--minutes", type=float, default=25, help="time for all steps together")
    parser.add_argument("--pack", type=Path, help="archive to write logs and rows to, .tar.gz")
    parser.add_argument("--list", action="store_true", help="print the steps, and which are done")
    parser.add_argument("--step", choices=[step.name for step in STEPS if step.calls], help="this step alone, in TO")
    parser.add_argument("--resume", action="store_true", help="continue the run of --step")
    asked = parser.parse_args()
    if asked.step is not None:
        (step,) = (step for step in STEPS if step.name == asked.step)
        return _call(step, asked.to, resume=asked.resume)
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
