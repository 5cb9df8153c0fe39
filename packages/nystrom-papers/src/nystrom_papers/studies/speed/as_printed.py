r"""The two papers' tables of time and memory, measured on this machine and compared with the printed numbers.

- Table 1 of Nyströmformer: one attention module over the length (`nystrom_papers.bench.efficiency`, without the
  skip convolution), forward as in the paper; `--size paper` adds forward+backward. The paper gives neither the number
  of heads nor their width: 8 heads of 64 are a guess. It prints averages over calls; here are medians of interleaved
  calls.
- Table 2 of Skyformer: one training step of each task (`nystrom_papers.bench.training`), instead of 50,000 steps
  with their evaluations.

Both are compared, as in the papers, by ratios to exact attention that stores its n x n matrix, `softmax-materialised`.
Fused exact attention, `softmax` (`scaled_dot_product_attention`), stores no such matrix, and is what a user would
replace today. A claim about exact attention is therefore decided separately against each of the two, for time and for
memory; beside the fused form, which the papers did not have, it is this library's own. near_far is measured too, but no
claim rests on it.

A call not run for lack of time or memory is left out of the order and of the lengths. A claim about every task needs
all tasks.

Source: Xiong et al. (2021), arXiv:2102.03902, Table 1; Chen et al. (2021), arXiv:2111.00035, section 5 and Table 2.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations, product
from pathlib import Path
from typing import Any, get_args

import pandas as pd

from nystrom_lab.data.lra.facts import LRA
from nystrom_lab.measure.rows import Row
from nystrom_lab.training.presets import find_preset
from nystrom_papers.bench.efficiency import EfficiencyOptions, run_efficiency
from nystrom_papers.bench.options import TABLE_2_METHODS, Pass, TrainingOptions
from nystrom_papers.bench.training import run_training
from nystrom_papers.report.plots.speed import speed_figure
from nystrom_papers.report.printed_ratios import BASE, NYSTROMFORMER_TABLE_1, PRINTED_RATIOS, SKYFORMER_TABLE_2, Cost
from nystrom_papers.report.summary import OURS
from nystrom_papers.studies.reproduce.declared import Answer, Cells, Claim, Pivot, by, declare, each, frame_of
from nystrom_papers.studies.reproduce.known import UNKNOWN, Known, holds_for_share, quartiles_of, roughly
from nystrom_papers.studies.reproduce.study import Part, Plan, Setting, Study, in_words

_FUSED = "softmax"
# Names of the two forms of exact attention in verdicts.
_EXACT = {BASE: "materialised softmax", _FUSED: "fused exact attention"}
_TABLE_1_METHODS = (BASE, _FUSED, "linformer-256", "longformer-257", "nystrom-64", "nystrom-32", "near_far")

_SKYFORMER, _LINFORMER, _LONGFORMER = "skyformer-128", "linformer-256", "longformer-257"
# The part of itself to which a memory is known.
_PART = 0.01
# Pairs that the papers print nearer than this are in no order.
_APART = 1.2

# Rows by method, column (a length or a task) and "memory" or "time".
_Cells = Mapping[tuple[str, str, str], Any]


def _plan_efficiency(setting: Setting) -> Plan:
    paper = setting.size == "paper"
    device = _device(setting)
    lengths = (512, 1024, 2048, 4096, 8192)
    repeats = 9 if paper else 3
    passes = get_args(Pass) if paper else ("forward",)
    said = in_words(
        methods=_TABLE_1_METHODS, lengths=lengths, sizes="1 sequence, 8 heads of 64", passes=passes, repeats=repeats,
        device=device,
    )  # fmt: skip
    differs = "8 heads of 64, which the paper does not say, and medians instead of averages"
    if not paper:
        differs = f"a CPU instead of an NVIDIA 1080 Ti, {differs}"
    options = partial(
        EfficiencyOptions, methods=_TABLE_1_METHODS, passes=passes, skip="without", repeats=repeats, device=device
    )
    parts = [
        Part(f"n={n}", lambda folder, n=n: run_efficiency(options(lengths=(n,), to=folder / "bench"))) for n in lengths
    ]
    return Plan(parts, said, differs)


def _plan_training(setting: Setting) -> Plan:
    paper = setting.size == "paper"
    device = _device(setting)
    # A sixteenth of the paper's batch.
    batches = {task: find_preset(task, "skyformer").batch_size // (1 if paper else 16) for task in LRA}
    repeats = 3 if paper else 2
    said_of_batches = ", ".join(f"{task} {batch}" for task, batch in batches.items())
    said = in_words(methods=TABLE_2_METHODS, batches=said_of_batches, repeats=repeats, device=device)
    differs = "a step instead of 50,000 steps with their evaluations"
    if not paper:
        differs += ", a CPU instead of an NVIDIA V100, and a sixteenth of the paper's batches"
    parts = [Part(task, partial(_measure_task, task, batch, repeats, device)) for task, batch in batches.items()]
    return Plan(parts, said, differs)


def _measure_task(task: str, batch: int, repeats: int, device: str, folder: Path) -> Iterable[Row]:
    return run_training(
        TrainingOptions(tasks=(task,), batch=batch, repeats=repeats, device=device, to=folder / "bench" / task)
    )


def _device(setting: Setting) -> str:
    if setting.size == "small":
        return "cpu"
    import torch

    if not torch.cuda.is_available():
        raise ValueError("--size paper measures on a GPU, as the paper does, and torch finds none here: leave it out.")
    return "cuda"


def _framed(study: str, rows: Sequence[Row]) -> pd.DataFrame:
    """The rows; for forward passes and steps also what they are of, their column, and how many times less they are."""
    frame = frame_of(rows)
    words = [quantity.rpartition(" ") for quantity in frame["quantity"]]
    frame["column"] = [
        str(n) if before == "forward" else before.removesuffix(" step") if before.endswith(" step") else ""
        for (before, *_), n in zip(words, frame["n"], strict=True)
    ]
    frame["what"] = [what if column else "" for (*_, what), column in zip(words, frame["column"], strict=True)]
    frame["shown"] = frame["value"].map(_number)
    exact = {(row.what, row.column): row.value for row in each(frame, method=BASE)}
    printed = [PRINTED_RATIOS[study].get((row.what, row.method, row.column), math.nan) for row in each(frame)]
    times = [exact.get((row.what, row.column), math.nan) / row.value for row in each(frame)]
    frame["times"] = [
        "" if math.isnan(theirs) else f"{'–' if math.isnan(ours) else f'{ours:.1f}'} / {theirs:.1f}"
        for ours, theirs in zip(times, printed, strict=True)
    ]
    # The quantity, if the paper prints its ratio.
    frame["compared"] = [what if ratio else "" for what, ratio in zip(frame["what"], frame["times"], strict=True)]
    return frame


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _tables(head: str, call: str = "") -> list[Pivot]:
    """Tables of memory, then of time: the numbers, and how many times less than exact attention with its matrix."""
    return [
        Pivot(title=f"{call}{title}", index={"method": "{method}"}, columns=[numbers])
        for what, unit in (("memory", "MB"), ("time", "ms"))
        for title, numbers in (
            (f"{what}, {unit}", Cells(head, None, "{shown}", what=what)),
            (f"{what}: times less than {BASE}, here / printed", Cells(head, None, "{times}", compared=what)),
        )
    ]


def _known(of: _Cells, method: str, column: str, what: str) -> Known:
    row = of.get((method, column, what))
    return UNKNOWN if row is None else quartiles_of(row) if what == "time" else roughly(row.value, _PART)


def _less(of: _Cells, method: str, other: str, column: str, what: str) -> Known:
    """How many times less memory or time a method takes than another."""
    return _known(of, other, column, what).over(_known(of, method, column, what))


def _said(known: Known) -> str:
    """The geometric middle of what is known, as text."""
    return _number(math.sqrt(known.low * known.high))


def _order(of: _Cells, printed: Mapping[str, Mapping[str, Cost]], columns: Sequence[str]) -> Answer:
    answers = []
    for column, what in product(columns, Cost._fields):
        for (a, of_a), (b, of_b) in combinations(printed.items(), 2):
            theirs = getattr(of_a[column], what) / getattr(of_b[column], what)
            ours = _less(of, b, a, column, what) if theirs > 1 else _less(of, a, b, column, what)
            if max(theirs, 1 / theirs) >= _APART and not math.isnan(ours.low):
                answers.append(ours.above())
    return holds_for_share(answers, 0.9), (
        f"{answers.count(True)} of {len(answers)} pairs are, of those that the paper prints at least {_APART:g} times "
        f"apart, and {answers.count(None)} cannot be told."
    )


def _order_at_longest(of: _Cells) -> Answer:
    printed = {m: {str(n): Cost(*pair) for n, pair in lengths.items()} for m, lengths in NYSTROMFORMER_TABLE_1.items()}
    return _order(of, printed, [str(n) for n in _lengths(of) if n in NYSTROMFORMER_TABLE_1[BASE]][-1:])


def _lengths(of: _Cells) -> list[int]:
    return sorted({int(column) for _, column, _ in of})


def _linear(of: _Cells) -> Answer:
    lengths = [n for n in _lengths(of) if n >= 1024]
    if len(lengths) < 2:
        return None, "two lengths of at least 1024 are needed."
    first, last = lengths[0], lengths[-1]

    def exponent(method: str, what: str) -> Known:
        longer, shorter = (_known(of, method, str(n), what) for n in (last, first))
        return Known(*(math.log(end, last / first) for end in longer.over(shorter)))

    exponents = {(m, what): exponent(m, what) for m in ("nystrom-64", "nystrom-32", BASE) for what in Cost._fields}
    answers = [
        # The baseline tells whether the lengths were measured alike.
        known.within(most=1.2) if exponents[BASE, what].within(1.7, 2.3) and known.within(least=0.5) else None
        for (method, what), known in exponents.items()
        if method != BASE
    ]
    said = ", ".join(
        f"{(low + high) / 2:.2f} ({what} of {method})" for (method, what), (low, high) in exponents.items()
    )
    return holds_for_share(answers), f"exponents from n = {first} to {last}: {said}."


def _favorable(what: str, exact: str, of: _Cells) -> Answer:
    less = {n: _less(of, "nystrom-64", exact, str(n), what) for n in _lengths(of)}
    known = [n for n in less if not math.isnan(less[n].low)]
    if not known:
        return None, "it was measured at no length."
    beyond = [n for n in known if all(less[k].above() for k in known if k >= n)]
    where = f"from n = {beyond[0]} on" if beyond else "not beyond doubt at the longest length"
    times = ", ".join(f"{_said(less[n])} (n = {n})" for n in known)
    return less[known[-1]].above(), f"with 64 landmarks {where}; times less: {times}."


def _over_others(of: _Cells) -> Answer:
    others = ((_LONGFORMER, "time", 3), (_LONGFORMER, "memory", 1.2), (_LINFORMER, "memory", 1.7))
    less = [(_less(of, "nystrom-32", other, "8192", what), limit) for other, what, limit in others]
    agrees = holds_for_share(known.within(least=0.9 * limit) for known, limit in less)
    if any(math.isnan(known.low) for known, _ in less):
        return agrees, "n = 8192 was not measured."
    time, memory, linformer = (_said(known) for known, _ in less)
    return agrees, (
        f"nystrom-32 takes {time} times less time than Longformer, and {memory} and {linformer} times less memory than "
        "Longformer and Linformer."
    )


def _everywhere(
    pair: tuple[str, str], tasks: Iterable[str], what: str, limit: Callable[[Known], bool | None], of: _Cells
) -> Answer:
    """How many times less the first of two methods takes than the second, in each task."""
    less = {task: _less(of, *pair, task, what) for task in tasks}
    said = ", ".join(f"{_said(known)} ({task})" for task, known in less.items())
    return holds_for_share(map(limit, less.values())), f"times less {what} than {pair[1]}: {said}."


_TABLE_1, _TABLE_2 = "Nyströmformer, Table 1", "Skyformer, section 5 and Table 2"
_IN_ORDER = f"The methods are in the printed order of time and memory, exact attention being {_EXACT[BASE]}."


def _claim(says: str, source: str, rule: Callable[[_Cells], Answer]) -> Claim:
    return Claim(says, lambda frame: rule(by(frame, None, "method", "column", "what", what=Cost._fields)), source)


# The forms of exact attention, what verdicts call them, and whose claim it is that something takes less.
_FORMS = ((BASE, _EXACT[BASE], None), (_FUSED, _EXACT[_FUSED], OURS))
_CLAIMS = {
    "efficiency": [
        _claim("Time and memory of Nyström attention grow linearly.", _TABLE_1, _linear),
        *(
            _claim(
                f"From some length on Nyström attention takes less {what} than {name}.", ours or _TABLE_1,
                partial(_favorable, what, exact),
            )
            for (exact, name, ours), what in product(_FORMS, Cost._fields)
        ),
        _claim(_IN_ORDER, _TABLE_1, _order_at_longest),
        _claim(
            "At n = 8192 it takes a third of Longformer's time, and 1.2 and 1.7 times less memory than Longformer and "
            "Linformer.", _TABLE_1, _over_others,
        ),
    ],
    "training": [
        *(
            _claim(
                f"Skyformer takes less {what} than {name} in every task.", ours or _TABLE_2,
                partial(_everywhere, (_SKYFORMER, exact), LRA, what, Known.above),
            )
            for (exact, name, ours), what in product(_FORMS, Cost._fields)
        ),
        *(
            _claim(
                f"Skyformer is nearly 4 times as fast as {name} on Text and Retrieval.", ours or _TABLE_2,
                partial(
                    _everywhere, (_SKYFORMER, exact), ("text", "retrieval"), "time", partial(Known.within, least=3)
                ),
            )
            for exact, name, ours in _FORMS
        ),
        *(
            # Kernelized attention is fused here. The memory that the paper prints for Text and Image is about half.
            _claim(
                f"Kernelized attention saves little {what} beside {_EXACT[_FUSED]}.", _TABLE_2,
                partial(_everywhere, ("kernelized", _FUSED), LRA, what, partial(Known.within, most=1.5)),
            )
            for what in Cost._fields
        ),
        _claim(_IN_ORDER, _TABLE_2, lambda of: _order(of, SKYFORMER_TABLE_2, list(LRA))),
    ],
}  # fmt: skip


def _study(study: str, tables: Sequence[Pivot], **facts: Any) -> Study:
    return declare(
        framed=partial(_framed, study),
        tables=tables,
        claims=_CLAIMS[study],
        figures=lambda frame, folder: {"": speed_figure([replace(row, study=study) for row in frame["row"]])},
        **facts,
    )


STUDIES = {
    "nystromformer-table-1": _study(
        "efficiency",
        _tables("n={column}", "forward "),
        shows="time and memory of attention over the length",
        source="Nyströmformer, arXiv:2102.03902, Table 1",
        paper_needs="a GPU",
        minutes=1.4,
        plan=_plan_efficiency,
    ),
    "skyformer-table-2": _study(
        "training",
        _tables("{column}"),
        shows="time and memory of a training step of each task",
        source="Skyformer, arXiv:2111.00035, Table 2",
        paper_needs="a GPU",
        minutes=3,
        plan=_plan_training,
    ),
}
