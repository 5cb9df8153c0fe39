"""`nystrom bench ranks`: time, memory and bytes of a sequence split across processes, against one process.

Each measurement, of one method, length and number of processes, runs in its own processes on this machine, which
communicate by gloo, and has three or four rows:

- "forward time" and "forward+backward time" of attention, or "step time" of an encoder: median over the repeats of the
  slowest process, `low` and `high` being the quartiles;
- "memory": the most that a process held, interpreter and libraries included;
- "bytes sent": what the process that sends most passes to the collectives in one call, as counted by `count_bytes`.

A measurement of exact attention that would exceed the time limit, judging by its time at a shorter length, is skipped,
and any measurement that does exceed the limit is stopped. Its rows hold NaN and a note.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from nystrom.attention.registry import METHODS
from nystrom.checks import check_at_least, check_choice, check_names, check_seed
from nystrom.progress import Progress
from nystrom.turns import quartiles
from nystrom.whole_files import check_folder
from nystrom_lab.measure.rows import Row, append_rows, cpu_name, new_row, read_rows
from nystrom_lab.studies.speed.asked import command_line, differing_setting
from nystrom_lab.studies.speed.choices import Dtype

What = Literal["attention", "encoder"]
_TIMES = {"attention": ("forward time", "forward+backward time"), "encoder": ("step time",)}


class _Case(NamedTuple):
    n: int
    method: str
    processes: int

    @property
    def name(self) -> str:
        return f"{self.method}, {self.processes} process{'es' if self.processes > 1 else ''}"


def run_ranks(
    *,
    lengths: tuple[int, ...] = (65536, 262144, 1048576),
    what: What = "attention",
    methods: tuple[str, ...] = ("nystrom", "near_far", "linear", "softmax"),
    processes: tuple[int, ...] = (1, 4),
    batch: int = 1,
    heads: int = 8,
    width: int = 64,
    layers: int = 2,
    landmarks: int = 64,
    dtype: Dtype = "float32",
    repeats: int = 1,
    seed: int = 0,
    threads: int = 1,
    limit_seconds: float = 900.0,
    to: Path = Path("runs/ranks"),
) -> list[Row]:
    """Measure one attention layer, or a training step of an encoder, with tokens split across processes.

    Rows go to ranks.csv in the folder, a measurement at a time. The same command continues an interrupted run.

    Args:
        lengths: Numbers of tokens n, each a multiple of the processes.
        what: "attention" measures the function, forward and backward; "encoder" a step of AdamW on token labels.
        methods: Methods that work across ranks; "softmax" is exact attention.
        processes: Numbers of processes; 1 runs without a process group.
        batch: Sequences b.
        heads: Heads h.
        width: Width d of one head.
        layers: Layers of the encoder.
        landmarks: Landmarks of the methods that have them.
        dtype: Dtype of inputs and weights.
        repeats: Timed calls, after a short untimed one.
        seed: Seed of the random inputs.
        threads: Threads of each process.
        limit_seconds: Skip or stop measurements that take longer.
        to: Folder of the results.

    Raises:
        ValueError: An unknown or out-of-range argument, or a folder that holds another setting.
    """
    asked = dict(locals())
    _check(asked)
    check_folder(to)
    path = to / "ranks.csv"
    command = command_line(("nystrom", "bench", "ranks"), run_ranks, asked, "lengths")
    rows = _done(path, asked, command)
    cases = [_Case(n, method, size) for n in sorted(set(lengths)) for method in methods for size in processes]
    progress = Progress("ranks", len(cases), unit="cases")
    for case in cases:
        if any((row.n, row.method) == (case.n, case.name) for row in rows):
            progress.update()
            continue
        estimate = _estimate(case, rows)
        if estimate is not None and estimate * repeats > limit_seconds:
            calls = "one call" if repeats == 1 else f"each of {repeats} calls"
            found: dict[str, Any] | str = f"{calls} would take about {estimate:.0f} s, the limit is {limit_seconds:g} s"
            progress.update()
        else:
            with progress.doing(f"n={case.n} {case.name}"):
                found = _measure(case, asked)
        new = _rows(case, found, asked, command)
        append_rows(path, new)
        rows += new
        print(f"n={case.n} {case.name}: {new[0].note or 'measured'}, in {path}.", file=sys.stderr)
    wanted = {(case.n, case.name) for case in cases}
    return [row for row in rows if (row.n, row.method) in wanted]


def _check(asked: dict[str, Any]) -> None:
    for name in ("lengths", "methods", "processes"):
        if not asked[name]:
            raise ValueError(f"{name} is empty; expected at least one.")
    check_choice("what", asked["what"], get_args(What))
    check_choice("dtype", asked["dtype"], get_args(Dtype))
    able = [name for name, method in METHODS.items() if method.over_ranks and method.weights is None]
    check_names("method", asked["methods"], able)
    for name in ("batch", "heads", "width", "layers", "landmarks", "repeats", "threads"):
        check_at_least(name, asked[name], 1)
    check_seed("seed", asked["seed"])
    if not asked["limit_seconds"] > 0:
        raise ValueError(f"limit_seconds is {asked['limit_seconds']}; expected a positive number.")
    for size in asked["processes"]:
        check_at_least("an entry of processes", size, 1)
        for n in asked["lengths"]:
            check_at_least("an entry of lengths", n, 1)
            if n % size:
                raise ValueError(
                    f"{n} tokens cannot be split evenly across {size} processes: pass a multiple of {size}."
                )


def _done(path: Path, asked: dict[str, Any], command: str) -> list[Row]:
    """Rows of earlier runs of the same setting."""
    if not path.exists():
        return []
    rows = read_rows(path)
    like = _rows(_Case(1, "nystrom", 1), "only to compare", asked, command)[0]
    for row in rows:
        differs = differing_setting(row, like, "lengths")
        if differs is not None:
            name, came, wanted = differs
            raise ValueError(
                f"{path} holds rows with {name} {came!r}, and this run has {wanted!r}: choose another --to."
            )
    return rows


def _estimate(case: _Case, rows: Sequence[Row]) -> float | None:
    """Estimated seconds of a call of exact attention, by the square of the length; None where there is no estimate."""
    if case.method != "softmax":
        return None
    shorter = [
        row for row in rows if row.method == case.name and row.unit == "s" and not row.note and (row.n or 0) < case.n
    ]
    return max((row.value * (case.n / (row.n or 1)) ** 2 for row in shorter), default=None)


def _measure(case: _Case, asked: dict[str, Any]) -> dict[str, Any] | str:
    """The results of the processes, or why there are none."""
    given = {name: value for name, value in asked.items() if name not in ("lengths", "methods", "processes", "to")}
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        limit = time.monotonic() + asked["limit_seconds"]
        try:
            for rank in range(case.processes):
                told = given | {"n": case.n, "method": case.method, "rank": rank, "size": case.processes}
                words = [sys.executable, "-m", "nystrom_lab.studies.parallel.one_rank", json.dumps(told), folder]
                # Each process reads its input, which closes when this process ends, and then ends as well.
                ranks.append(
                    subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
                )
            while any(rank.poll() is None for rank in ranks):
                failed = next((rank for rank in ranks if rank.poll()), None)
                if failed is not None:
                    break
                if time.monotonic() > limit:
                    return f"took longer than the limit of {asked['limit_seconds']:g} s"
                time.sleep(0.05)
            failed = next((rank for rank in ranks if rank.poll()), None)
            if failed is not None:
                assert failed.stderr is not None
                said = failed.stderr.read().decode(errors="replace").strip().splitlines()
                return (
                    f"process {ranks.index(failed)} ended with {failed.returncode}: {said[-1] if said else 'no word'}"
                )
            found = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(case.processes)]
        finally:
            for rank in ranks:
                rank.kill()
                rank.communicate()
    slowest = {name: [max(times) for times in zip(*(one["seconds"][name] for one in found), strict=True)]
               for name in _TIMES[asked["what"]]}  # fmt: skip
    return {
        "seconds": slowest,
        "memory": max(one["memory"] for one in found),
        "bytes": max(one["bytes"] for one in found),
    }


def _rows(case: _Case, found: dict[str, Any] | str, asked: dict[str, Any], command: str) -> list[Row]:
    note, nothing = (found, [float("nan")]) if isinstance(found, str) else ("", [])
    values: list[tuple[str, str, list[float]]] = []
    for name in _TIMES[asked["what"]]:
        values.append((name, "s", nothing if isinstance(found, str) else found["seconds"][name]))
    values.append(("memory", "MB", nothing if isinstance(found, str) else [found["memory"]]))
    values.append(("bytes sent", "MB", nothing if isinstance(found, str) else [found["bytes"] / 1e6]))
    facts = {"b": asked["batch"], "h": asked["heads"], "d": asked["width"]}
    facts |= {"layers": asked["layers"]} if asked["what"] == "encoder" else {}
    facts |= {"threads": asked["threads"]}
    made = []
    for name, unit, each in values:
        low, middle, high = quartiles(each) if len(each) > 1 else (None, *each, None)
        made.append(
            new_row(
                study="ranks",
                quantity=f"{asked['what']} {name}",
                method=case.name,
                value=middle,
                unit=unit,
                low=low,
                high=high,
                repeats=len(each),
                n=case.n,
                m=asked["landmarks"],
                facts=facts,
                dtype=asked["dtype"],
                seed=asked["seed"],
                device=cpu_name(),
                command=command,
                note=note,
            )
        )
    return made
