"""All that a GPU is to be measured on, in order: `make gpu`, or `python tools/measure_gpu.py --to runs/gpu`.

The steps are those of `STEPS`, the most telling first: the tests that need a GPU, whole encoders launched eagerly and
by a CUDA graph, near_far at growing sizes, whole encoders compiled; then tiles, errors and tables. Each is a process of
its own, with its output in TO/NAME.log and its rows in TO/NAME; a step that ended well leaves TO/NAME.done. The same
command goes on with the steps that are left, and an interrupted table goes on after its last length. No step begins
that would not end in the minutes that are left, and none goes on beyond them. One that fails is named at the end, and
does not keep the others from running; rows without a value are printed with what they say.

Minutes are estimates for an H200 and 16 cores, a quarter of a minute for the imports of a process included. Tests and
errors are estimated from runs with 14 cores, encoders from times of their attention and of shorter
lengths on an H100, a second and a half for the random weights of each encoder, and the compiler's time on a CPU. The
first `FIRST` steps take 13 minutes or less in all.

Neither package need be installed: the steps find them. They need torch, Triton, transformers and what these need,
pytest with pytest-xdist and pytest-timeout, hypothesis, jaxtyping and psutil, but nothing that only the command line
needs.
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "packages" / "nystrom" / "src"))


_ROOT = Path(__file__).resolve().parents[1]
# The place in a command for the folder of the step.
_FOLDER, _PYTHON = "{to}", sys.executable
# Seconds that an interrupted step has to say how far it was.
_GRACE = 10


class Step(NamedTuple):
    """One step.

    Attributes:
        name: Name of the step, and of its folder.
        minutes: About how long it takes on an H200; it is ended after half as long again.
        words: The command; {to} is the folder of the step.
        calls: The function that the command calls, as "module:function", or as "module:function:class" with the class
            of its options; "" if it is another program.
        given: The options, except for the folder `to`.
    """

    name: str
    minutes: float
    words: tuple[str, ...]
    calls: str = ""
    given: Mapping[str, Any] = {}

    def call(self, to: Path) -> Any:
        """Call the function of the step in this process, with this folder for its results."""
        module, function, *options = self.calls.split(":")
        there, given = importlib.import_module(module), {**self.given, "to": to}
        call = getattr(there, function)
        return call(getattr(there, options[0])(**given)) if options else call(**given)


def _called(name: str, minutes: float, calls: str, **given: Any) -> Step:
    words = (_PYTHON, "tools/measure_gpu.py", "--step", name, "--to", _FOLDER)
    return Step(name, minutes, words, calls, given | {"device": "cuda"})


_efficiency = partial(
    _called, calls="nystrom_papers.bench.efficiency:run_efficiency:EfficiencyOptions", dtype="bfloat16"
)
_model = partial(_called, calls="nystrom_papers.bench.model:run_model:ModelOptions", dtype="bfloat16")


def _tests(name: str, minutes: float, *words: str) -> Step:
    """Tests; what other versions than those they are written for warn of is no error."""
    command = (_PYTHON, "-m", "pytest", "-m", "gpu", "-q", "--tb", "short", "-W", "default", "-p", "no:cacheprovider")
    return Step(f"tests-{name}", minutes, (*command, *words))


# Exact attention, and this library by its kernels.
_METHODS = ("softmax", "nystrom-triton-64", "near_far-triton", "near_far-growing-triton", "near_far-heads-triton")
_TABLE = ("softmax", "authors-64", "nystrom-64", "nystrom-triton-64", "near_far", "near_far-triton", "skyformer-128")
_LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
_LAUNCHES: dict[str, Any] = {"launches": ("eager", "graph")}
# Measurements that `backend="auto"` does not rest on yet: one method beside its kernels, at few lengths.
_PAIRS = ("nystrom-64", "nystrom-triton-64", "near_far", "near_far-triton", "skyformer-128", "skyformer-triton-128")
_WIDER: dict[str, Any] = {"methods": _PAIRS, "lengths": (512, 4096, 16384), "skip": "without", "repeats": 9}
_TIMED = (
    "packages/nystrom/tests/test_clock.py",
    "packages/nystrom-lab/tests/measure/test_peak.py",
    "packages/nystrom-papers/tests/bench/test_floor.py",
)
_IN_PARALLEL = ("packages/nystrom/tests/gpu", "packages/nystrom-papers/tests/bench/test_launches.py")

_FIRST = (
    # Most of the time of tests is the compiler's.
    _tests("kernels", 3, "-n", "logical", *_IN_PARALLEL),
    # BERT-base: up to 8,192 tokens a forward pass takes 10 to 40 ms and a training step 30 to 80, mostly for the host.
    _model("model-single", 1.75, methods=_METHODS, lengths=(2048, 8192, 32768), **_LAUNCHES),
    # At 32,768 tokens a pass takes up to 1.1 s, and a training step does not fit into half of the memory.
    _model("model-eight", 2.75, methods=_METHODS, lengths=(2048, 8192, 16384, 32768), batch=8, repeats=3, **_LAUNCHES),
    _efficiency(
        "growing", 1, methods=("softmax", "near_far-triton", "near_far-growing-triton", "near_far-growing-choice"),
        lengths=(4096, 8192, 16384, 32768, 65536), batch=8, passes=("forward",), repeats=5, **_LAUNCHES,
    ),
    _called(
        "hidden", 0.5, "tools.gpu_errors:write_model_errors", lengths=(2048, 8192, 32768),
        methods=("softmax", *_METHODS[2:], "near_far-selected"),
    ),
    # One method a step, since rows are written when all that a step compiles is done.
    *(
        _model(f"compiled-{name}", 0.9, methods=(name,), lengths=(8192,), launches=("eager", "compiled"))
        for name in _METHODS[:3]
    ),
    # torch's operators compute this one.
    _model("selected", 0.6, methods=("near_far-selected",), lengths=(2048, 8192), repeats=3),
)  # fmt: skip
FIRST = len(_FIRST)

STEPS = (
    *_FIRST,
    _called(
        "tiles-near_far", 2.5, "tools.tune_tiles:print_fastest", method="near_far", landmarks=320, batch=8, heads=8,
        tokens=8192,
    ),
    _tests("times", 0.5, *_TIMED),
    Step("errors", 1.5, (_PYTHON, "tools/gpu_errors.py", "--to", f"{_FOLDER}/errors.csv")),
    _efficiency("wider-128", 1.5, **_WIDER, batch=8, width=128),
    _efficiency("wider-float16", 1.5, **_WIDER | {"dtype": "float16"}, batch=8),
    _efficiency("lengths", 3, methods=_TABLE, lengths=_LENGTHS, batch=8, repeats=9),
    _called("training", 2, "nystrom_papers.bench.training:run_training:TrainingOptions", precision="bfloat16"),
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
            # A process that a shell starts in the background ignores the signal, and so would its children.
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
    """The notes of rows without a value."""
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


def _call(step: Step, to: Path) -> int:
    """Call the function of a step, and print its rows; a ValueError is one line."""
    try:
        found = step.call(to)
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
    parser.add_argument("--minutes", type=float, default=13, help="time for all steps together")
    parser.add_argument("--pack", type=Path, help="archive to write logs and rows to, .tar.gz")
    parser.add_argument("--list", action="store_true", help="print the steps, and which are done")
    parser.add_argument("--step", choices=[step.name for step in STEPS if step.calls], help="this step alone, in TO")
    asked = parser.parse_args()
    if asked.step is not None:
        (step,) = (step for step in STEPS if step.name == asked.step)
        return _call(step, asked.to)
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
