"""Tables, verdicts and the figure of the fine-tuning studies."""

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from nystrom.attention.method_names import split_name
from nystrom_lab.data.language.labelled.glue import find_labelled
from nystrom_lab.measure.rows import Row
from nystrom_lab.report.plots.canvas import PAGE, figure_of, method_looks
from nystrom_lab.report.printed import FINETUNED
from nystrom_lab.report.summary import Verdict
from nystrom_lab.report.table import Table
from nystrom_lab.studies.reproduce.known import error_over, is_competitive

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EXACT = "softmax"
SHARE = "texts longer than the landmarks"
_LONG = 1024
# MNLI has a second split with texts of other kinds, which is scored but not trained on.
_MISMATCHED = "_mismatched"
# Sizes of the published test splits with labels. A score over as many texts is of the published test, even where the
# validation split is our own part of the training texts.
_TESTS = {"mrpc": 1_725, "imdb": 25_000}
# Share of the class that F1 is computed for, in the published splits.
_POSITIVES = {"mrpc": 0.67, "qqp": 0.37}
# Share of long texts below which Nyström and exact attention are nearly the same by construction.
_ENOUGH = 0.1


class TaskScore(NamedTuple):
    """The scores of one method on one task.

    Attributes:
        values: The score of each seed.
        texts: How many texts are scored.
        own: Whether the texts are a split of our own, not the published one.
        split: "test" or "validation".
        positives: Share of the texts in the class that F1 is computed for; None for an accuracy.
    """

    values: tuple[float, ...]
    texts: int
    own: bool
    split: str

    positives: float | None = None

    @property
    def mean(self) -> float:
        """Mean over the seeds."""
        return statistics.fmean(self.values)

    @property
    def shown(self) -> str:
        """The mean in per cent; with several seeds, also their standard deviation and number."""
        spread = f" ± {100 * statistics.stdev(self.values):.1f} ({len(self.values)})" if len(self.values) > 1 else ""
        return f"{100 * self.mean:.1f}{spread}"

    def error_beside(self, other: "TaskScore") -> float:
        """The standard error of the difference of the two, as if they were scored on different texts."""
        return math.hypot(self.error, other.error)

    @property
    def error(self) -> float:
        """The standard error of the mean, as if each seed were scored on the same texts."""
        p, of_seeds = self.mean, error_over(self.values) if len(self.values) > 1 else 0.0
        if self.positives is None:
            return math.hypot(math.sqrt(p * (1 - p) / self.texts), of_seeds)
        # F1 = 2 t / (2 t + f) for t true positives and f false positives and negatives together. To first order its
        # variance over multinomial counts is F1 (1 - F1) (2 - F1) / (2 t + f), and the mean of 2 t + f is twice the
        # number of positives if as many texts are predicted positive as are.
        return math.hypot(math.sqrt(p * (1 - p) * (2 - p) / (2 * self.positives * self.texts)), of_seeds)


def scores(
    rows: Sequence[Row], kind: str = "run", *, n: int | None = None, mismatched: bool = False
) -> dict[tuple[str, str], TaskScore]:
    """Scores by task and method; of runs of up to n tokens, where n is given; on MNLI's mismatched texts, if asked for.

    A mean is over the seeds of one precision, that of most runs: another precision would be a difference that is not
    the method's.
    """
    found: dict[tuple[str, str], dict[str, dict[int | None, Row]]] = {}
    for row in rows:
        task = row.fact("task")
        split, _, metric = row.quantity.partition(" ")
        split = split.removesuffix(_MISMATCHED) if split.endswith(_MISMATCHED) is mismatched else ""
        of_kind = row.fact("kind") == kind and (n is None or row.n == n)
        if not of_kind or split not in ("test", "validation") or metric != find_labelled(task).metrics[0]:
            continue
        seeds = found.setdefault((task, row.method), {}).setdefault(row.dtype, {})
        # Where test labels are known, the test split counts.
        if split == "test" or not (row.seed in seeds and seeds[row.seed].quantity.startswith("test")):
            seeds[row.seed] = row
    return {
        (task, method): _score(task, list(max(precisions.values(), key=len).values()))
        for (task, method), precisions in found.items()
    }


def _with_mismatched(rows: Sequence[Row], *, n: int | None = None) -> dict[tuple[str, str], TaskScore]:
    """The scores, followed by those on the mismatched texts of MNLI as a separate task."""
    others = scores(rows, n=n, mismatched=True)
    return scores(rows, n=n) | {(f"{task} mismatched", method): score for (task, method), score in others.items()}


def _score(task: str, rows: Sequence[Row]) -> TaskScore:
    split, texts = rows[0].quantity.partition(" ")[0], rows[0].repeats
    # No split of our own is drawn from the mismatched texts.
    whole = (split == "test" and texts == _TESTS.get(task)) or split.endswith(_MISMATCHED)
    own = not whole and any(row.fact("splits") == "own" for row in rows)
    return TaskScore(tuple(row.value for row in rows), texts, own, split, _POSITIVES.get(task))


def _shares(rows: Sequence[Row]) -> dict[tuple[str, int | None], float]:
    """Share of the scored texts that are longer than m, by task and m."""
    return {(row.fact("task"), row.m): row.value for row in rows if row.fact("kind") == "lengths"}


def tables_2(rows: Sequence[Row]) -> Sequence[Table]:
    """Tables of the scores and the printed ones, scores by length, swapped attention, and the search."""
    found, shares = _with_mismatched(rows), _shares(rows)
    lines = []
    # Runs may have ended in any order; exact attention comes first.
    tasks = list(dict.fromkeys(task for task, _ in found))

    def place(key: tuple[str, str]) -> tuple[int, str, bool]:
        return tasks.index(key[0].removesuffix(" mismatched")), key[0], key[1] != EXACT

    for (task, method), score in sorted(found.items(), key=lambda each: place(each[0])):
        base, m = split_name(method)
        share = shares.get((task, m))
        exact = found.get((task, EXACT))
        printed = {EXACT: "BERT-base", "nystrom": "Nyströmformer"}.get(base)
        gap = "" if exact is None or method == EXACT else f"{100 * (score.mean - exact.mean):+.1f}"
        split = f"{score.split.removesuffix(_MISMATCHED)}{', own' if score.own else ''}"
        seen = "" if share is None else f"{100 * share:.0f}"
        lines.append([task, method, split, str(score.texts), seen, score.shown, gap])
        lines[-1].append("" if printed is None else f"{FINETUNED[printed][task]:.1f}")
    equal = ", ".join(task for (task, m), share in shares.items() if m == 64 and share == 0)
    title = (
        "scores: F1 for mrpc and qqp, accuracy elsewhere, ± over (seeds of one precision); > m: texts longer than the "
        "landmarks"
    )
    if equal:
        title += f"; with 64 landmarks exact, since no text is longer: {equal}"
    heads = ["task", "attention", "split", "texts", "> m, %", "score", "gap", "paper"]
    tables = [Table(title, heads, lines, left=3)]
    tables += _tables_by_length(rows)
    swapped = scores(rows, "swapped")
    if swapped:
        changes = {
            (row.fact("task"), row.method): row.value
            for row in rows
            if row.quantity.endswith("predictions that change")
        }
        cells = [
            [task, method, score.shown, f"{100 * (score.mean - swapped[task, EXACT].mean):+.1f}",
             f"{100 * changes[task, method]:.1f}", found[task, method].shown if (task, method) in found else ""]
            for (task, method), score in swapped.items()
        ]  # fmt: skip
        heads = ["task", "attention", "score", "gap", "changed, %", "trained so"]
        tables.append(Table("trained with exact attention, read with another, seed 0", heads, cells, left=2))
    trials = [row for row in rows if row.quantity.endswith("of a trial")]
    searched = scores(rows, "search")
    if trials:
        best = max(trials, key=lambda row: row.value)
        cells = []
        for row in trials:
            after = searched[row.fact("task"), row.method].shown if row is best else ""
            batch, rate = row.fact("batch_size"), row.fact("learning_rate")
            cells.append([row.method, batch, rate, f"{100 * row.value:.1f}", after])
        heads = ["attention", "batch", "rate", "validation F1", "test F1"]
        tables.append(Table("the search on mrpc; the best on validation is tested", heads, cells))
    return tables


def _tables_by_length(rows: Sequence[Row]) -> list[Table]:
    """The accuracy on short and on long texts, and the gap to exact attention; a table for each task."""
    tables = []
    those = [row for row in rows if row.fact("kind") == "by-length"]
    for task in dict.fromkeys(row.fact("task") for row in those):
        found = {(row.method, row.n): row for row in those if row.fact("task") == task}
        lengths = sorted({n for _, n in found if n is not None})
        lines = []
        for method in dict.fromkeys(method for method, _ in found):
            cells = []
            for n in lengths:
                value, exact = found[method, n].value, found.get((EXACT, n))
                gap = "" if exact is None or method == EXACT else f" ({100 * (value - exact.value):+.1f})"
                cells.append(f"{100 * value:.1f}{gap}")
            lines.append([method, *cells])
        texts = {n: next(row.repeats for (_, length), row in found.items() if length == n) for n in lengths}
        heads = ["attention", *(f"to {n} tokens ({texts[n]:,})" for n in lengths)]
        title = f"accuracy on {task} by the length of a text (texts), less that of exact attention, seed 0"
        tables.append(Table(title, heads, lines))
    return tables


def verdicts_2(rows: Sequence[Row]) -> Sequence[Verdict]:
    """A verdict for each task, and one for each search."""
    found, searched, shares = scores(rows), scores(rows, "search"), _shares(rows)
    verdicts = []
    for task in dict.fromkeys(task for task, _ in found):
        sizes = [(m, method) for t, method in found if t == task and (m := split_name(method)[1]) is not None]
        if (task, EXACT) not in found or not sizes:
            continue
        m, method = min(sizes, key=lambda size: abs(size[0] - 64))
        exact, ours, share = found[task, EXACT], found[task, method], shares.get((task, m), 0.0)
        numbers = (
            f"{method} {ours.shown} %, exact {exact.shown} % on {exact.texts} texts, standard error of the difference "
            f"at most {100 * ours.error_beside(exact):.1f}; {100 * share:.0f} % of the texts are longer than the "
            "landmarks."
        )
        claim = f"Nyström attention performs competitively with exact attention on {task}."
        verdicts.append(_beside(task, claim, ours, exact, numbers, decides=share >= _ENOUGH))
    for (task, method), ours in searched.items():
        exact = searched.get((task, EXACT), found.get((task, EXACT)))
        if exact is None or method == EXACT:
            continue
        numbers = (
            f"{method} {ours.shown} % on the test texts, exact {exact.shown} %, standard error at most "
            f"{100 * ours.error_beside(exact):.1f}."
        )
        both = (task, EXACT) in searched
        if not both:
            numbers += f" Exact attention was not searched, which favours {method}."
        claim = f"After the search on {task} it performs competitively with exact attention."
        verdicts.append(_beside(task, claim, ours, exact, numbers, decides=both))
    return verdicts


def _beside(task: str, claim: str, ours: TaskScore, exact: TaskScore, numbers: str, *, decides: bool) -> Verdict:
    """Whether a score is competitive with exact attention; unknown where exact attention is no better than a guess."""
    guess = _guess(task)
    if exact.mean - 2 * exact.error <= guess:
        return Verdict(claim, None, f"{numbers} Exact attention is no better than a guess, {100 * guess:.1f} %.")
    agrees = is_competitive(ours.mean - exact.mean, ours.error_beside(exact)) if decides else None
    return Verdict(claim, agrees, numbers)


def _guess(task: str) -> float:
    """The score of one class for all texts of the published splits; 0 for metrics other than F1 and accuracy."""
    if task in _POSITIVES:
        return 2 * _POSITIVES[task] / (1 + _POSITIVES[task])
    of = find_labelled(task)
    return 1 / len(of.classes) if of.classes and of.metrics[0] == "accuracy" else 0.0


def tables_1(rows: Sequence[Row]) -> Sequence[Table]:
    """Scores at 512 and at 1,024 tokens."""
    lines = []
    for n in (512, _LONG):
        for (task, method), score in _with_mismatched(rows, n=n).items():
            printed = FINETUNED["Nyströmformer (1024)" if n == _LONG else "Nyströmformer"][task]
            shown = "" if method == EXACT else f"{printed:.1f}"
            lines.append([task, method, str(n), str(score.texts), score.shown, shown])
    heads = ["task", "attention", "tokens", "texts", "score", "paper"]
    return [Table("scores in per cent", heads, lines, left=2)]


def verdicts_1(rows: Sequence[Row]) -> Sequence[Verdict]:
    """A verdict for each task and method; exact attention at both lengths is only in the table."""
    short, long = scores(rows, n=512), scores(rows, n=_LONG)
    verdicts = []
    for (task, method), score in long.items():
        before, guess = short.get((task, method)), _guess(task)
        if before is None or method == EXACT:
            continue
        error, agrees = score.error_beside(before), None
        numbers = (
            f"{score.shown} % at {_LONG} tokens, {before.shown} % at 512, standard error at most {100 * error:.1f}."
        )
        if before.mean - 2 * before.error <= guess:
            numbers += f" The latter is no better than a guess, {100 * guess:.1f} %."
        else:
            agrees = is_competitive(-abs(score.mean - before.mean), error)
        verdicts.append(Verdict(f"With {method}, {task} at {_LONG} tokens is fairly similar to 512.", agrees, numbers))
    return verdicts


def figures(rows: Sequence[Row], folder: Path) -> "Mapping[str, Figure]":
    """The difference from exact attention, or of 1,024 from 512 tokens, with bars of two standard errors."""
    found, long = scores(rows, n=512), scores(rows, n=_LONG)
    axis = f"score of {_LONG} tokens less that of 512, points" if long else "score less that of exact attention, points"
    # Each run with that of exact attention, or with its own at 512 tokens, if there is one.
    pairs = [
        (task, method, score, found[other])
        for (task, method), score in (long or found).items()
        if (long or method != EXACT) and (other := (task, method if long else EXACT)) in found
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
            [100 * (score.mean - other.mean) for _, score, other in points],
            [row + offset for row, _, _ in points],
            xerr=[200 * score.error_beside(other) for _, score, other in points],
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
