"""Fig. 5 and 6 of Nyströmformer and Fig. 5 of its supplement: masked words and sentence order over the steps.

DATA/mlm, what `nystrom data prepare mlm-sop` made, is learned by an encoder with each attention; the accuracies on
held-out documents are its curves. Each training is a run of `nystrom pretrain`, in the folder pretraining-small or
pretraining-paper beside those of the studies, which share them. Bands and intervals are those of a share (Wilson, 95 %)
over the masked words or the instances.

Claims and the rules that decide on them, on the accuracies after the last step; sentence order decides nothing where no
training is above chance, that is, has an interval above one half:

- Fig. 5, "our Nyström self-attention is competitive to standard self-attention": it is at most two percentage points
  below it (the widest gap in the paper's Table 2 is 1.6).
- Fig. 5, "outperforming Linformer and other linear self-attentions": it is above both, by intervals that do not meet.
- "nystrom, no skip" decides nothing: it shows what of Nyström attention's curve is its convolution of the values, which
  sees neighbours and which no other attention here has.
- Fig. 6, "competitive with standard self-attention, BERT-base": as in Fig. 5, both trained from scratch.
- Fig. 6, "initializing from pretrained BERT-base helps speed up training": started from the trained exact model, at the
  end of half the steps, it is at most an interval below the one from scratch after all steps.
- Supplement, Fig. 5, "Training on longer input sequence remains the same MLM performance": at twice the length it is
  within two points of the training that went on at the old length, for as many steps over as many tokens.
- The same, "our model increases the SOP performance": it is above that one, by intervals that do not meet.

Source: Xiong et al. (2021), arXiv:2102.03902, Fig. 5 and 6; its supplement, (C) and Fig. 5; the figures print no
numbers.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nystrom_lab.data.language.mlm_sop.dataset import MlmSop
from nystrom_lab.measure.rows import Row, read_rows
from nystrom_lab.report.plots.curves import read_curves
from nystrom_lab.report.plots.lines import draw_lines
from nystrom_lab.report.summary import Verdict
from nystrom_lab.report.table import Table
from nystrom_lab.studies.reproduce.study import Part, Plan, Setting, Study
from nystrom_lab.studies.training.runs import Training, said, train
from nystrom_lab.training.results import wilson

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MLM, SOP = "validation MLM accuracy", "validation SOP accuracy"
_TITLES = {MLM: "masked words", SOP: "sentence order"}
_NEAR = 0.02
_COMPETITIVE = "Nyström attention is competitive to standard self-attention"
_FROM_EXACT, _LONGER, _SAME = "nystrom from softmax", "nystrom, longer", "nystrom, same length"
_NO_SKIP = "nystrom, no skip"
_OTHERS = ("linformer", "linear")
# Names of rows, and of the folders of their runs.
_FOLDERS = {
    _FROM_EXACT: "nystrom-from-softmax",
    _LONGER: "nystrom-longer",
    _SAME: "nystrom-same-length",
    _NO_SKIP: "nystrom-no-skip",
}

_SMALL: dict[str, Any] = {
    "preset": "demo", "steps": 2000, "warmup_steps": 200, "learning_rate": 1e-3, "evaluate_every": 250,
    "log_every": 50, "instances": 1024, "seed": 0, "precision": "bfloat16",
}  # fmt: skip
_CONTINUED: dict[str, Any] = _SMALL | {
    "preset": "longer", "steps": 500, "warmup_steps": 0, "learning_rate": 1e-4,
}  # fmt: skip
_SMALL_DIFFERS = (
    "4 layers x 256 with 4 heads and 32 landmarks instead of 512 wide or BERT-base with 64, instances of 256 tokens "
    "instead of 512, 2,000 steps of 16 instead of 100,000 or 500,000 of 256, learning rate 1e-3 instead of 1e-4, the "
    "corpus of --data instead of books and Wikipedia, and an exact model that was trained here instead of BERT-base"
)

_PAPER_DIFFERS = (
    "the corpus of --data instead of books and Wikipedia, attention weights that are not dropped, and a width of "
    "BERT-small that the paper does not say"
)


def _figure_5(setting: Setting) -> Plan:
    methods = ("softmax", "nystrom", *_OTHERS)
    if setting.size == "paper":
        return _plan(setting, {name: {"preset": "bert-small", "attention": name} for name in methods})
    trainings = {name: _SMALL | {"attention": name} for name in methods}
    # What the convolution of the values does, which the other attentions do not have.
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
    """The trainings by the names of their rows; a `model` that is one of them is its best checkpoint."""
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
        Part(trained.name, partial(_measure, name, trainings, setting.size)) for name, trained in trainings.items()
    ]
    return Plan(
        parts,
        {"data": said_of_data} | said(list(trainings.values())),
        _PAPER_DIFFERS if setting.size == "paper" else _SMALL_DIFFERS,
    )


def _measure(name: str, trainings: Mapping[str, Training], size: str, folder: Path) -> Iterable[Row]:
    """Train, and give the accuracies at each evaluation, and the results of the run."""
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


def _step(row: Row) -> float | None:
    """The step that a row is of; None for the results of the best checkpoint."""
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
        found += [
            _near(_COMPETITIVE, what, last, "nystrom", "softmax"),
            _above("It outperforms Linformer and linear attention", what, last, "nystrom", _OTHERS),
        ]
    return found


def _verdicts_6(rows: Sequence[Row]) -> Sequence[Verdict]:
    found = []
    for quantity, what in _TITLES.items():
        last = _last(rows, quantity)
        found.append(
            _near("Nyström attention is competitive to standard self-attention", what, last, "nystrom", "softmax")
        )
        ours, other = last.get(_FROM_EXACT), last.get("nystrom")
        claim = f"Starting from the trained exact model speeds up training: {what}."
        numbers, agrees = _numbers(last, (_FROM_EXACT, "nystrom")), None
        if ours is not None and other is not None and not _by_chance(quantity, last):
            agrees = _interval(ours)[1] >= other.value
            numbers += f" The former took {_step(ours):.0f} steps, the latter {_step(other):.0f}."
        found.append(Verdict(claim, agrees, numbers))
    return found


def _verdicts_longer(rows: Sequence[Row]) -> Sequence[Verdict]:
    mlm, sop = _last(rows, MLM), _last(rows, SOP)
    return [
        _near("On longer sequences the accuracy is the same", _TITLES[MLM], mlm, _LONGER, _SAME, both=True),
        _above("On longer sequences the accuracy rises", _TITLES[SOP], sop, _LONGER, (_SAME,)),
    ]


def _near(claim: str, what: str, last: Mapping[str, Row], ours: str, other: str, *, both: bool = False) -> Verdict:
    """Whether one accuracy is at most two points below another, or, with `both`, also not above it by more."""
    numbers, agrees = _numbers(last, (ours, other)), None
    if ours in last and other in last and not _by_chance(last[ours].quantity, last):
        gap = last[other].value - last[ours].value
        agrees = abs(gap) <= _NEAR if both else gap <= _NEAR
    return Verdict(f"{claim}: {what}.", agrees, numbers)


def _above(claim: str, what: str, last: Mapping[str, Row], ours: str, others: Sequence[str]) -> Verdict:
    """Whether an accuracy is above others by intervals that do not meet; unknown where they meet."""
    numbers, agrees = _numbers(last, (ours, *others)), None
    present = [last[name] for name in others if name in last]
    if ours in last and len(present) == len(others) and not _by_chance(last[ours].quantity, last):
        if all(_interval(last[ours])[0] > _interval(row)[1] for row in present):
            agrees = True
        elif any(last[ours].value < row.value for row in present):
            agrees = False
    return Verdict(f"{claim}: {what}.", agrees, numbers)


def _by_chance(quantity: str, last: Mapping[str, Row]) -> bool:
    """Whether no training has learned anything of the order of sentences."""
    return quantity == SOP and not any(_interval(row)[0] > 0.5 for row in last.values())


def _numbers(last: Mapping[str, Row], names: Sequence[str]) -> str:
    said = [f"{name} {_percent(last[name])} %" if name in last else f"{name} was not measured" for name in names]
    quantity = next((row.quantity for row in last.values()), "")
    return ", ".join(said) + (": none above chance." if _by_chance(quantity, last) else ".")


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
            log_x=False,
            log_y=False,
            share_y=False,
        )
    }


STUDIES = {
    "nystromformer-figure-5": Study(plan=_figure_5, tables=_tables, verdicts=_verdicts_5, figures=_figures),
    "nystromformer-figure-6": Study(plan=_figure_6, tables=_tables, verdicts=_verdicts_6, figures=_figures),
    "supplement-figure-5": Study(plan=_longer, tables=_tables, verdicts=_verdicts_longer, figures=_figures),
}
