"""Scores of fine-tuned models, and what the fine-tuning studies declare of them: tables, claims and the figure."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from nystrom.attention.method_names import split_name
from nystrom_lab.data.language.labelled.glue import find_labelled
from nystrom_lab.measure.rows import Row
from nystrom_lab.report.plots.canvas import PAGE, figure_of, method_looks
from nystrom_papers.report.printed import FINETUNED
from nystrom_papers.studies.reproduce.declared import Answer, Cells, Claim, Pivot, by, declare, frame_of
from nystrom_papers.studies.reproduce.known import error_over, is_competitive
from nystrom_papers.studies.reproduce.study import Figures

EXACT, SCORE = "softmax", "score"
SHARE = "texts longer than the landmarks"
_CHANGED, _TRIAL = "predictions that change", "validation F1 of a trial"
LONG = 1024
# MNLI has a second split with texts of other kinds, which is scored but not trained on.
_MISMATCHED = "mismatched"
# Sizes of the published test splits with labels. A score over as many texts is of the published test, even where the
# validation split is our own part of the training texts.
_TESTS = {"mrpc": 1_725, "imdb": 25_000}
# Share of the class that F1 is computed for, in the published splits.
_POSITIVES = {"mrpc": 0.67, "qqp": 0.37}
# Share of long texts below which Nyström and exact attention are nearly the same by construction.
_ENOUGH = 0.1

# Kind ("run", "search" or "swapped"), tokens, task and method.
Key = tuple[str, int | None, str, str]


def scores(rows: Sequence[Row]) -> dict[Key, Row]:
    """Scores by kind, length, task and method, those on MNLI's mismatched texts as a task of their own.

    Tasks are in the order of the rows, and exact attention is the first of each. A mean is over the seeds of one
    precision, that of most runs: another precision would be a difference that is not the method's.
    """
    by_key: dict[Key, dict[str, dict[int | None, Row]]] = {}
    for row in rows:
        task = row.fact("task")
        split, _, metric = row.quantity.partition(" ")
        split, _, other = split.partition("_")
        if split not in ("test", "validation") or metric != find_labelled(task).metrics[0]:
            continue
        key = (row.fact("kind"), row.n, f"{task} {other}".strip(), row.method)
        seeds = by_key.setdefault(key, {}).setdefault(row.dtype, {})
        # If test labels are known, the test split counts.
        if split == "test" or not (row.seed in seeds and seeds[row.seed].quantity.startswith("test")):
            seeds[row.seed] = row
    tasks = list(dict.fromkeys(task.split()[0] for _, _, task, _ in by_key))

    def place(key: Key) -> tuple[int, int, str, bool]:
        _, n, task, method = key
        return n or 0, tasks.index(task.split()[0]), task, method != EXACT

    most = {key: max(by_key[key].values(), key=len) for key in sorted(by_key, key=place)}
    return {key: _score(key[2], list(seeds.values())) for key, seeds in most.items()}


def _score(task: str, rows: Sequence[Row]) -> Row:
    """The mean of a score over seeds that are scored on the same texts, and its standard error to each side."""
    first, values = rows[0], [row.value for row in rows]
    mean, several = statistics.fmean(values), len(values) > 1
    # No split of our own is drawn from the mismatched texts.
    whole = _MISMATCHED in task or (first.quantity.startswith("test") and first.repeats == _TESTS.get(task))
    own = not whole and any(row.fact("splits") == "own" for row in rows)
    split = first.quantity.partition(" ")[0].partition("_")[0]
    error = math.sqrt(mean * (1 - mean) / first.repeats)
    if task in _POSITIVES:
        # F1 = 2 t / (2 t + f) for t true positives and f false positives and negatives together. To first order its
        # variance over multinomial counts is F1 (1 - F1) (2 - F1) / (2 t + f), and the mean of 2 t + f is twice the
        # number of positives if as many texts are predicted positive as are.
        error *= math.sqrt((2 - mean) / (2 * _POSITIVES[task]))
    error = math.hypot(error, error_over(values) if several else 0.0)
    spread = f" ± {100 * statistics.stdev(values):.1f} ({len(values)})" if several else ""
    return replace(first, quantity=SCORE, value=mean, low=mean - error, high=mean + error).with_facts(
        task=task, split=f"{split}{', own' if own else ''}", shown=f"{100 * mean:.1f}{spread}"
    )


def error_beside(score: Any, other: Any) -> float:
    """The standard error of the difference of two scores, as if they were of different texts."""
    return math.hypot(score.high - score.low, other.high - other.low) / 2


def framed(rows: Sequence[Row]) -> pd.DataFrame:
    """The rows, and the scores with their gaps to exact attention, the printed ones, and the shares of long texts."""
    best_scores = scores(rows)
    shares = {(row.fact("task"), row.m): row.value for row in rows if row.fact("kind") == "lengths"}
    by_length = {row.n: row.value for row in rows if row.fact("kind") == "by-length" and row.method == EXACT}
    best = max((row.value for row in rows if row.quantity == _TRIAL), default=0.0)
    lines = []
    for (kind, n, task, method), score in best_scores.items():
        base, m = split_name(method)
        exact, trained = best_scores.get((kind, n, task, EXACT)), best_scores.get(("run", n, task, method))
        printed = {EXACT: "BERT-base", "nystrom": "Nyströmformer (1024)" if n == LONG else "Nyströmformer"}.get(base)
        gap = "" if exact is None else f"{100 * (score.value - exact.value):+.1f}"
        lines.append(score.with_facts(
            exact="yes" if method == EXACT else "",
                gap="" if exact is score and kind == "run" else gap, trained=trained and trained.fact("shown"),
            share=shares.get((task, m)), longer=f"{100 * shares[task, m]:.0f}" if (task, m) in shares else "",
            paper=f"{FINETUNED[printed][task]:.1f}" if printed else "",
        ))  # fmt: skip
    for row in rows:
        shown = f"{100 * row.value:.1f}"
        if row.fact("kind") == "by-length" and row.method != EXACT and row.n in by_length:
            shown += f" ({100 * (row.value - by_length[row.n]):+.1f})"
        tested = best_scores.get(("search", row.n, row.fact("task"), row.method)) if row.value == best else None
        lines.append(row.with_facts(shown=shown, tested=tested and tested.fact("shown")))
    frame = frame_of(lines)
    equal = ", ".join(task for (task, m), share in shares.items() if m == 64 and share == 0)
    frame["equal"] = f"; with 64 landmarks exact, since no text is longer: {equal}" if equal else ""
    return frame


_TASK = {"task": "{task}", "attention": "{method}"}
_TABLES_2 = [
    Pivot(
        title="scores: F1 for mrpc and qqp, accuracy elsewhere, ± over (seeds of one precision); > m: texts longer "
        "than the landmarks{equal}",
        index=_TASK | {"split": "{split}", "texts": "{repeats}", "> m, %": "{longer}"},
        columns=[
            Cells("score", SCORE, "{shown}", kind="run"),
            Cells("gap", SCORE, "{gap}", kind="run"),
            Cells("paper", SCORE, "{paper}", kind="run"),
        ],
        left=3,
    ),
    Pivot(
        title="accuracy on {task} by the length of a text (texts), less that of exact attention, seed {seed}",
        index={"attention": "{method}"},
        columns=[Cells("to {n} tokens ({repeats:,})", None, "{shown}", kind="by-length")],
    ),
    Pivot(
        title="trained with exact attention, read with another, seed {seed}",
        index=_TASK,
        columns=[
            Cells("score", SCORE, "{shown}", kind="swapped"),
            Cells("gap", SCORE, "{gap}", kind="swapped"),
            Cells("changed, %", [f"{split} {_CHANGED}" for split in ("test", "validation")], "{percent:.1f}"),
            Cells("trained so", SCORE, "{trained}", kind="swapped"),
        ],
    ),
    Pivot(
        title="the search on {task}; the best on validation is tested",
        index={"attention": "{method}", "batch": "{batch_size}", "rate": "{learning_rate}"},
        columns=[Cells("validation F1", _TRIAL, "{shown}"), Cells("test F1", _TRIAL, "{tested}")],
        left=1,
    ),
]
_TABLES_1 = [
    Pivot(
        title="scores in per cent",
        index=_TASK | {"tokens": "{n}", "texts": "{repeats}"},
        columns=[Cells("score", SCORE, "{shown}", kind="run"), Cells("paper", SCORE, "{paper}", kind="run", exact="")],
        missing="",
        left=2,
    )
]


def _scores(frame: pd.DataFrame, kind: str = "run", **where: Any) -> dict[tuple[str, str], Any]:
    """Scores by task and method, without those on mismatched texts."""
    cells = by(frame, SCORE, "task", "method", kind=kind, **where)
    return {key: score for key, score in cells.items() if _MISMATCHED not in key[0]}


def _claims_2(frame: pd.DataFrame) -> list[Claim]:
    """A claim for each task that was measured with both attentions, and one for each search."""
    cells, source = _scores(frame), "Nyströmformer, Table 2"
    competitive = "performs competitively with exact attention"
    return [
        *(
            Claim(f"Nyström attention {competitive} on {task}.", partial(_beside, task), source)
            for task in dict.fromkeys(task for task, _ in cells)
            if (task, EXACT) in cells and _nearest(cells, task)
        ),
        *(
            Claim(f"After the search on {of[0]} it {competitive}.", partial(_after_search, *of), source)
            for of in _scores(frame, "search")
            if of[1] != EXACT and (of[0], EXACT) in cells | _scores(frame, "search")
        ),
    ]


def _nearest(cells: Mapping[tuple[str, str], Any], task: str) -> str:
    """The method with the number of landmarks nearest to the paper's 64; "" if there is none."""
    sizes = [(m, method) for of, method in cells if of == task and (m := split_name(method)[1]) is not None]
    return min(sizes, key=lambda size: abs(size[0] - 64))[1] if sizes else ""


def _beside(task: str, frame: pd.DataFrame) -> Answer:
    """Whether Nyström attention is competitive with exact attention."""
    cells = _scores(frame)
    method = _nearest(cells, task)
    ours, exact = cells[task, method], cells[task, EXACT]
    share = float(ours.share or 0)
    numbers = (
        f"{method} {ours.shown} %, exact {exact.shown} % on {exact.repeats} texts, standard error of the difference "
        f"at most {100 * error_beside(ours, exact):.1f}; {100 * share:.0f} % of the texts are longer than the "
        "landmarks."
    )
    return _judged(task, ours, exact, numbers, decides=share >= _ENOUGH)


def _after_search(task: str, method: str, frame: pd.DataFrame) -> Answer:
    """Whether the run that is best on validation is, on the test texts, after a search of the same size for both."""
    searched = _scores(frame, "search")
    ours, exact = searched[task, method], (_scores(frame) | searched)[task, EXACT]
    both = (task, EXACT) in searched
    numbers = (
        f"{method} {ours.shown} % on the test texts, exact {exact.shown} %, standard error at most "
        f"{100 * error_beside(ours, exact):.1f}."
    )
    numbers += "" if both else f" Exact attention was not searched, which favours {method}."
    return _judged(task, ours, exact, numbers, decides=both)


def _judged(
    task: str, ours: Any, other: Any, numbers: str, *, decides: bool = True, both: bool = False,
    what: str = "Exact attention",
) -> Answer:  # fmt: skip
    """Whether a score is competitive with another, or `both` are; unknown where the other is no better than a guess."""
    guess = _guess(task)
    if other.value - (other.high - other.low) <= guess:
        return None, f"{numbers} {what} is no better than a guess, {100 * guess:.1f} %."
    gap = ours.value - other.value
    return is_competitive(-abs(gap) if both else gap, error_beside(ours, other)) if decides else None, numbers


def _guess(task: str) -> float:
    """The score of one class for all texts of the published splits; 0 for metrics other than F1 and accuracy."""
    if task in _POSITIVES:
        return 2 * _POSITIVES[task] / (1 + _POSITIVES[task])
    of = find_labelled(task)
    return 1 / len(of.classes) if of.classes and of.metrics[0] == "accuracy" else 0.0


def _claims_1(frame: pd.DataFrame) -> list[Claim]:
    """A claim for each task and method; exact attention at both lengths is only in the table."""
    short = _scores(frame, n=512)
    return [
        Claim(
            f"With {method}, {task} at {LONG} tokens is fairly similar to 512.",
            partial(_longer, task, method),
            "Nyströmformer, supplement, Table 1",
        )
        for task, method in _scores(frame, n=LONG)
        if method != EXACT and (task, method) in short
    ]


def _longer(task: str, method: str, frame: pd.DataFrame) -> Answer:
    long, short = (_scores(frame, n=n)[task, method] for n in (LONG, 512))
    numbers = (
        f"{long.shown} % at {LONG} tokens, {short.shown} % at 512, standard error at most "
        f"{100 * error_beside(long, short):.1f}."
    )
    return _judged(task, long, short, numbers, both=True, what="The latter")


def _figures(frame: pd.DataFrame, folder: Path) -> Figures:
    """The difference from exact attention, or of 1,024 from 512 tokens, with bars of two standard errors."""
    short, long = _scores(frame, n=512), _scores(frame, n=LONG)
    axis = f"score of {LONG} tokens less that of 512, points" if long else "score less that of exact attention, points"
    # Each run with that of exact attention, or with its own at 512 tokens, if there is one.
    pairs = [
        (task, method, score, short[other])
        for (task, method), score in (long or short).items()
        if (long or method != EXACT) and (other := (task, method if long else EXACT)) in short
    ]
    if not pairs:
        return {}
    looks = method_looks(dict.fromkeys(method for _, method, _, _ in pairs))
    tasks = list(dict.fromkeys(task for task, _, _, _ in pairs))
    figure = figure_of(PAGE, 0.9 + 0.45 * max(2, len(tasks)))
    axes = figure.subplots()
    axes.axvline(0.0, color="0.6", linewidth=0.8)
    fills = ("full", "none", "left", "bottom")
    for place, (method, style) in enumerate(looks.items()):
        offset = (place - (len(looks) - 1) / 2) * 0.2
        points = [(tasks.index(task), score, other) for task, name, score, other in pairs if name == method]
        axes.errorbar(
            [100 * (score.value - other.value) for _, score, other in points],
            [row + offset for row, _, _ in points],
            xerr=[200 * error_beside(score, other) for _, score, other in points],
            linestyle="",
            marker=style.marker or "o",
            color=style.colour,
            # Sizes of one method differ in the fill of their marker.
            fillstyle=fills[place % len(fills)],
            linewidth=1.0,
            label=method,
        )
    axes.set_yticks(range(len(tasks)), tasks)
    axes.invert_yaxis()
    axes.set_xlabel(f"{axis}; bars are two standard errors")
    axes.grid(True, axis="x")
    figure.legend(loc="outside right upper")
    return {"": figure}


declare_1 = partial(declare, framed=framed, tables=_TABLES_1, claims=[_claims_1], figures=_figures)
declare_2 = partial(declare, framed=framed, tables=_TABLES_2, claims=[_claims_2], figures=_figures)
