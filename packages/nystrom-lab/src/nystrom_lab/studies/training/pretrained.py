"""Fig. 5 and 6 of Nyströmformer and Fig. 5 of its supplement: masked words and sentence order over the steps.

An encoder with each attention is trained on DATA/mlm, which `nystrom data prepare mlm-sop` made; its curves are the
accuracies on held-out documents. Each training is a run of `nystrom pretrain`. The runs are in the folder
pretraining-small or pretraining-paper, beside the folders of the studies, which share them. Bands and intervals are
those of a share (Wilson, 95 %) over the masked words or the instances.

The claims are decided on the accuracies after the last step. The standard error of a difference is that of two shares;
one seed is trained, so the spread over seeds is not in it. A training has learned if its interval is above a guess by
`MARGIN`:

- for sentence order the guess is one half;
- for masked words it is the guess without context, which repeats each visible word and gives each [MASK] the most
  frequent word. If the rows do not hold it, it is computed for a word that makes up a tenth of all words, more than any
  word does.

If a training that is compared has not learned, nothing is decided.

Claims and the rules that decide them:

- Fig. 5, "our Nyström self-attention is competitive to standard self-attention": its accuracy is at most two points
  below that of exact attention (`known.is_competitive`).
- Fig. 5, "outperforming Linformer and other linear self-attentions": its accuracy is above those of Linformer and of
  linear attention by more than two standard errors. The claim fails if it is below one of them by as much.
- Fig. 6, "competitive with standard self-attention, BERT-base": as in Fig. 5, with both models trained from scratch.
  This is decided at the paper's size only, since the runs of the small size are those of Fig. 5.
- Fig. 6, "initializing from pretrained BERT-base helps speed up training": the model that starts from the trained exact
  model takes half the steps. At their end it is at most two points below the model from scratch after all steps, as
  above. The claim fails if it is below the model from scratch after equally many steps by more than two standard
  errors. The exact model must have learned both words and order.
- Supplement, Fig. 5, "Training on longer input sequence remains the same MLM performance": the training at twice the
  length is within two points of one that continued at the old length, for as many steps over as many tokens.
- The same, "our model increases the SOP performance": the training at twice the length is above that one, as in Fig. 5.

"nystrom, no skip" decides nothing. It shows how much of Nyström attention's curve comes from its convolution of the
values, which sees neighbours and which no other attention here has; the verdicts of Fig. 5 state its accuracy.

Source: Xiong et al. (2021), arXiv:2102.03902, Fig. 5 and 6; its supplement, (C) and Fig. 5; the figures print no
numbers.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nystrom_lab.data.language.mlm_sop.dataset import AS_MASK, AS_WORD, IGNORED, MlmSop
from nystrom_lab.measure.rows import Row, cpu_name, new_row, read_rows
from nystrom_lab.report.plots.curves import read_curves
from nystrom_lab.report.plots.lines import draw_lines
from nystrom_lab.report.summary import Verdict
from nystrom_lab.report.table import Table
from nystrom_lab.studies.reproduce.known import MARGIN, Known, estimate, is_competitive, most
from nystrom_lab.studies.reproduce.study import Part, Plan, Setting, Study
from nystrom_lab.studies.training.runs import Training, said, train
from nystrom_lab.training.pretrain.data import HeldOutInstances
from nystrom_lab.training.results import wilson

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MLM, SOP = "validation MLM accuracy", "validation SOP accuracy"
_TITLES = {MLM: "masked words", SOP: "sentence order"}
GUESS = "validation MLM accuracy without context"
# The guess for a word that makes up a tenth of the text: in English text "the" makes up a twentieth.
_MOST_GUESSED = AS_MASK * 0.1 + 1 - AS_WORD
_INSTANCES = 1024
_COMPETITIVE = "Nyström attention is competitive to standard self-attention"
_FROM_EXACT, _LONGER, _SAME = "nystrom from softmax", "nystrom, longer", "nystrom, same length"
_NO_SKIP = "nystrom, no skip"
_OTHERS = ("linformer", "linear")
# From the names in rows to the folders of the runs.
_FOLDERS = {
    _FROM_EXACT: "nystrom-from-softmax",
    _LONGER: "nystrom-longer",
    _SAME: "nystrom-same-length",
    _NO_SKIP: "nystrom-no-skip",
}

_SMALL: dict[str, Any] = {
    "preset": "demo", "steps": 2000, "warmup_steps": 200, "learning_rate": 1e-3, "evaluate_every": 250,
    "log_every": 50, "instances": _INSTANCES, "seed": 0, "precision": "bfloat16",
}  # fmt: skip
_CONTINUED: dict[str, Any] = _SMALL | {
    "preset": "longer", "steps": 500, "warmup_steps": 0, "learning_rate": 1e-4,
}  # fmt: skip
_SMALL_DIFFERS = (
    "4 layers x 256 with 4 heads and 32 landmarks instead of 512 wide or BERT-base with 64, instances of 256 tokens "
    "instead of 512, 2,000 steps of 16 instead of 100,000 or 500,000 of 256, learning rate 1e-3 instead of 1e-4, the "
    "corpus of --data instead of books and Wikipedia, an exact model that was trained here instead of BERT-base, and "
    "AdamW instead of Adam with an L2 term"
)

_PAPER_DIFFERS = (
    "the corpus of --data instead of books and Wikipedia, attention weights that are not dropped, a width of "
    "BERT-small that the paper does not say, and AdamW instead of Adam with an L2 term"
)


def _figure_5(setting: Setting) -> Plan:
    methods = ("softmax", "nystrom", *_OTHERS)
    if setting.size == "paper":
        return _plan(setting, {name: {"preset": "bert-small", "attention": name} for name in methods})
    trainings = {name: _SMALL | {"attention": name} for name in methods}
    # Shows the part of the convolution of the values, which the other attentions do not have.
    return _plan(setting, trainings | {_NO_SKIP: trainings["nystrom"] | {"conv_kernel_size": 0}})


def _figure_6(setting: Setting) -> Plan:
    if setting.size == "paper":
        if setting.model is None:
            raise ValueError("--size paper starts from a trained BERT-base: name its folder with --model.")
        base = {name: {"preset": "bert-base", "attention": name} for name in ("softmax", "nystrom")}
        return _plan(setting, base | {_FROM_EXACT: base["nystrom"] | {"model": str(setting.model)}})
    base = {name: _SMALL | {"attention": name} for name in ("softmax", "nystrom")}
    half = {"steps": 1000, "warmup_steps": 100, "model": "softmax"}
    return _plan(setting, base | {_FROM_EXACT: base["nystrom"] | half})


def _longer(setting: Setting) -> Plan:
    if setting.size == "paper":
        base = {"nystrom": {"preset": "bert-base", "attention": "nystrom"}}
        longer = {"preset": "longer", "model": "nystrom"}
        return _plan(setting, base | {_LONGER: longer, _SAME: longer | {"length": 512, "batch_size": 256}})
    return _plan(
        setting,
        {
            "nystrom": _SMALL | {"attention": "nystrom"},
            _LONGER: _CONTINUED | {"model": "nystrom", "length": 512, "batch_size": 8},
            _SAME: _CONTINUED | {"model": "nystrom", "length": 256, "batch_size": 16},
        },
    )


def _plan(setting: Setting, wanted: Mapping[str, dict[str, Any]]) -> Plan:
    """The trainings by the names of their rows; a `model` that names one of them stands for its best checkpoint."""
    if setting.data is None:
        raise ValueError(
            "this study trains on DATA/mlm: make it with nystrom data prepare mlm-sop --to DATA/mlm, and pass "
            "--data DATA."
        )
    if setting.size == "small":
        wanted = {name: arguments | {"precision": setting.precision} for name, arguments in wanted.items()}
    data = setting.data / "mlm"
    corpus = MlmSop(data, "train")
    said_of_data = f"{len(corpus)} documents, vocabulary of {corpus.vocabulary.size}"
    trainings = {
        name: Training(_FOLDERS.get(name, name), "pretrain", arguments | {"data": str(data)})
        for name, arguments in wanted.items()
    }
    parts = [
        Part("guess", partial(_measure_guess, data)),
        *(Part(each.name, partial(_measure, name, trainings, setting.size)) for name, each in trainings.items()),
    ]
    return Plan(
        parts,
        {"data": said_of_data} | said(list(trainings.values())),
        _PAPER_DIFFERS if setting.size == "paper" else _SMALL_DIFFERS,
    )


def _measure(name: str, trainings: Mapping[str, Training], size: str, folder: Path) -> Iterable[Row]:
    """Train; yield the results of the run, then the accuracies at each evaluation."""
    runs = folder.parent / f"pretraining-{size}"
    training = trainings[name]
    start = training.arguments.get("model")
    if isinstance(start, str) and start in trainings:
        best = train(trainings[start], runs).best
        training = training._replace(arguments={**training.arguments, "model": str(best)})
    run = train(training, runs)
    curves, results = read_curves(run.curves), read_rows(run.rows)
    length = run.read()["settings"]["length"]
    for row in results:
        yield replace(row, method=name, n=length).with_facts(after="best")
    for quantity in (MLM, SOP):
        [model] = [row for row in results if row.quantity == quantity]
        for step, value, seconds in curves[quantity]:
            low, high = wilson(value, model.repeats)
            point = replace(model, method=name, n=length, value=value, low=low, high=high)
            yield point.with_facts(after=f"{step:.0f}", seconds=f"{seconds:.1f}")


def _measure_guess(data: Path, folder: Path) -> Iterable[Row]:
    """The share of the masked words of held-out documents that are guessed without context."""
    del folder
    held_out = HeldOutInstances(MlmSop(data, "val"), _INSTANCES)
    value, words = guess_without_context(held_out)
    low, high = wilson(value, words)
    yield new_row(
        study="", quantity=GUESS, method="no context", value=value, unit="", low=low, high=high, repeats=words,
        n=held_out.data.length, facts={"after": "best"}, device=cpu_name(),
    )  # fmt: skip


def guess_without_context(held_out: HeldOutInstances) -> tuple[float, int]:
    """The share of the words to be predicted that a guess without context gets right, and the number of these words.

    The guess takes the most frequent of them for every [MASK], and every visible word as it is.
    """
    instances = [held_out[number] for number in range(len(held_out))]
    seen, words = (np.concatenate([each[name] for each in instances]) for name in ("input_ids", "labels"))
    seen, words = seen[words != IGNORED], words[words != IGNORED]
    guess = np.where(seen == held_out.data.vocabulary.mask_token_id, np.bincount(words).argmax(), seen)
    return float((guess == words).mean()), len(words)


def _step(row: Row) -> float | None:
    """The step of a row; None for the results of the best checkpoint."""
    return None if row.facts["after"] == "best" else float(row.facts["after"])


def _last(rows: Sequence[Row], quantity: str) -> dict[str, Row]:
    """The last point of each curve, by name."""
    points = [row for row in rows if row.quantity == quantity and _step(row) is not None]
    return {row.method: row for row in sorted(points, key=lambda row: _step(row) or 0)}


def _tables(rows: Sequence[Row]) -> Sequence[Table]:
    results = {(row.method, row.quantity): row.value for row in rows if _step(row) is None}
    mlm, sop = _last(rows, MLM), _last(rows, SOP)
    lines = [
        [name, str(row.n), f"{_step(row):.0f}", _percent(row), _percent(sop[name]),
         f"{results[name, 'validation perplexity']:.1f}", f"{results[name, 'peak memory']:.0f}"]
        for name, row in mlm.items()
    ]  # fmt: skip
    heads = ["attention", "n", "steps", "MLM %", "SOP %", "perpl.", "MB"]
    return [Table("held-out documents, accuracies after the last step", heads, lines)]


def _percent(row: Row) -> str:
    low, high = _interval(row)
    return f"{100 * row.value:.1f} ± {50 * (high - low):.1f}"


def _interval(row: Row) -> tuple[float, float]:
    assert row.low is not None, "accuracies have intervals"
    assert row.high is not None, "accuracies have intervals"
    return row.low, row.high


def _verdicts_5(rows: Sequence[Row]) -> Sequence[Verdict]:
    found = []
    for quantity, what in _TITLES.items():
        last = _last(rows, quantity)
        skip = f" Without the convolution of the values {_percent(last[_NO_SKIP])} %." if _NO_SKIP in last else ""
        for verdict in (
            _near(rows, _COMPETITIVE, quantity, "nystrom", "softmax"),
            _above(rows, "It outperforms Linformer and linear attention", quantity, "nystrom", _OTHERS),
        ):
            found.append(verdict._replace(claim=f"{verdict.claim}: {what}.", numbers=verdict.numbers + skip))
    return found


def _verdicts_6(rows: Sequence[Row]) -> Sequence[Verdict]:
    found = []
    for quantity, what in _TITLES.items():
        if any(row.fact("preset") != _SMALL["preset"] for row in _last(rows, quantity).values()):
            verdict = _near(rows, _COMPETITIVE, quantity, "nystrom", "softmax")
            found.append(verdict._replace(claim=f"{verdict.claim}: {what}."))
        found.append(_faster(rows, quantity, f"Starting from the trained exact model speeds up training: {what}."))
    return found


def _faster(rows: Sequence[Row], quantity: str, claim: str) -> Verdict:
    last = _last(rows, quantity)
    names = (_FROM_EXACT, "nystrom")
    numbers = _numbers(rows, quantity, (*names, "softmax"))
    start_learned = all(_learned(rows, each, ("softmax",)) for each in _TITLES)
    if not all(name in last for name in names):
        return Verdict(claim, None, numbers)
    ours, other = (last[name] for name in names)
    numbers += f" The former took {_step(ours):.0f} steps, the latter {_step(other):.0f}"
    at_equal = [
        row for row in rows if row.quantity == quantity and row.method == "nystrom" and _step(row) == _step(ours)
    ]
    numbers += f" ({_percent(at_equal[0])} % after as many)." if at_equal else "."
    agrees = None
    if not start_learned:
        numbers += " The exact model has not learned both."
    elif _learned(rows, quantity, ("nystrom",)):
        slower = bool(at_equal) and _gap(ours, at_equal[0]).above(0) is False
        caught_up = is_competitive(ours.value - other.value, _error(ours, other))
        agrees = True if caught_up else False if slower else None
    return Verdict(claim, agrees, numbers)


def _verdicts_longer(rows: Sequence[Row]) -> Sequence[Verdict]:
    same = _near(rows, f"On longer sequences the accuracy is the same: {_TITLES[MLM]}.", MLM, _LONGER, _SAME, both=True)
    more = _above(rows, f"On longer sequences the accuracy rises: {_TITLES[SOP]}.", SOP, _LONGER, (_SAME,))
    return [same, more]


def _near(rows: Sequence[Row], claim: str, quantity: str, ours: str, other: str, *, both: bool = False) -> Verdict:
    """Whether one accuracy is competitive with another; with `both`, whether each is with the other."""
    last, agrees = _last(rows, quantity), None
    if _learned(rows, quantity, (ours, other)):
        gap, error = last[ours].value - last[other].value, _error(last[ours], last[other])
        agrees = is_competitive(-abs(gap) if both else gap, error)
    return Verdict(claim, agrees, _numbers(rows, quantity, (ours, other)))


def _above(rows: Sequence[Row], claim: str, quantity: str, ours: str, others: Sequence[str]) -> Verdict:
    """Whether an accuracy is above all of some others; False where it is below one."""
    last, agrees = _last(rows, quantity), None
    if _learned(rows, quantity, (ours, *others)):
        agrees = most(_gap(last[ours], last[other]).above(0) for other in others)
    return Verdict(claim, agrees, _numbers(rows, quantity, (ours, *others)))


def _error(row: Row, other: Row) -> float:
    """Standard error of the difference of two accuracies, from their 95 % intervals."""
    return math.hypot(*(high - low for low, high in map(_interval, (row, other)))) / (2 * 1.96)


def _gap(row: Row, other: Row) -> Known:
    """How far the first is above the second."""
    return estimate(row.value - other.value, _error(row, other))


def _guess(rows: Sequence[Row], quantity: str) -> float:
    """The accuracy of a guess without a model."""
    if quantity == SOP:
        return 0.5
    return next((row.value for row in rows if row.quantity == GUESS), _MOST_GUESSED)


def _learned(rows: Sequence[Row], quantity: str, names: Sequence[str]) -> bool:
    """Whether all these trainings are present and above the guess."""
    last, guess = _last(rows, quantity), _guess(rows, quantity)
    return all(name in last and _interval(last[name])[0] > guess + MARGIN for name in names)


def _numbers(rows: Sequence[Row], quantity: str, names: Sequence[str]) -> str:
    last = _last(rows, quantity)
    said = [f"{name} {_percent(last[name])} %" if name in last else f"{name} was not measured" for name in names]
    at_guess = [name for name in names if name in last and not _learned(rows, quantity, (name,))]
    known = "" if quantity == SOP or any(row.quantity == GUESS for row in rows) else "at most "
    guess = f" No better than a guess of {known}{100 * _guess(rows, quantity):.1f} %: {', '.join(at_guess)}."
    return f"{', '.join(said)}.{guess if at_guess else ''}"


def _figures(rows: Sequence[Row], folder: Path) -> "Mapping[str, Figure]":
    points = [row for row in rows if row.quantity in _TITLES and _step(row) is not None]
    percent = [
        replace(row, value=100 * row.value, low=100 * low, high=100 * high)
        for row in points
        for low, high in (_interval(row),)
    ]
    panels = {title: [row for row in percent if row.quantity == quantity] for quantity, title in _TITLES.items()}
    return {
        "": draw_lines(
            panels,
            over=_step,
            x_label="step",
            y_label="held-out accuracy, %",
            band="95 % intervals",
            line="single runs",
            log_x=False,
            log_y=False,
            share_y=False,
        )
    }


STUDIES = {
    "nystromformer-figure-5": Study(
        shows="MLM and SOP of small models over the steps",
        source="Nyströmformer, arXiv:2102.03902, Fig. 5",
        needs="--data with mlm",
        paper_needs="about 10 hours on an A100",
        trains=True,
        plan=_figure_5,
        tables=_tables,
        verdicts=_verdicts_5,
        figures=_figures,
    ),
    "nystromformer-figure-6": Study(
        shows="MLM and SOP of base models over the steps",
        source="Nyströmformer, arXiv:2102.03902, Fig. 6",
        needs="--data with mlm",
        paper_needs="--model with a trained BERT-base, about 190 hours on an A100",
        trains=True,
        plan=_figure_6,
        tables=_tables,
        verdicts=_verdicts_6,
        figures=_figures,
    ),
    "supplement-figure-5": Study(
        shows="MLM and SOP with 1,024 tokens",
        source="Nyströmformer, supplement, Fig. 5",
        needs="--data with mlm",
        paper_needs="about 45 hours on an A100",
        trains=True,
        plan=_longer,
        tables=_tables,
        verdicts=_verdicts_longer,
        figures=_figures,
    ),
}
