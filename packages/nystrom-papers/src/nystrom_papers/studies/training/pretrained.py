"""Fig. 5 and 6 of Nyströmformer and Fig. 5 of its supplement: masked words and sentence order over the steps.

An encoder with each attention is trained on DATA/mlm, which `nystrom data prepare mlm-sop` made; its curves are the
accuracies on held-out documents. Each training is a run of `nystrom pretrain`. The runs are in the folder
pretraining-small or pretraining-paper, beside the folders of the studies, which share them. Bands and intervals are
those of a share (Wilson, 95 %) over the masked words or the instances.

The claims are decided on the accuracies after the last step. The standard error of a difference is that of two shares;
one seed is trained, so the spread over seeds is not in it. A training has learned if its interval is above a guess by
`MARGIN`; if one that is compared has not, nothing is decided:

- for sentence order the guess is one half;
- for masked words it is the guess without context, which repeats each visible word and gives each [MASK] the most
  frequent word. If the rows do not hold it, it is computed for a word that makes up a tenth of all words, more than any
  word does.

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
from typing import Any

import numpy as np
import pandas as pd

from nystrom_lab.data.language.mlm_sop.dataset import AS_MASK, AS_WORD, IGNORED, MlmSop
from nystrom_lab.measure.rows import Row, read_rows
from nystrom_lab.report.plots.curves import read_curves
from nystrom_lab.training.pretrain.data import HeldOutInstances
from nystrom_lab.training.results import wilson
from nystrom_papers.studies.reproduce.declared import Answer, Cells, Claim, Lines, Pivot, by, declare, each, frame_of
from nystrom_papers.studies.reproduce.known import MARGIN, Known, estimate, holds_for_share, is_competitive
from nystrom_papers.studies.reproduce.study import Part, Plan, Setting, part
from nystrom_papers.studies.training.runs import Training, said, train

MLM, SOP = "validation MLM accuracy", "validation SOP accuracy"
_TITLES = {MLM: "masked words", SOP: "sentence order"}
GUESS = "validation MLM accuracy without context"
# The guess for a word that makes up a tenth of the text: in English text "the" makes up a twentieth.
_MOST_GUESSED = AS_MASK * 0.1 + 1 - AS_WORD
_INSTANCES = 1024
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
    "4 layers of width 256, with fewer heads, landmarks, tokens and steps than in the paper; learning rate 1e-3 "
    "instead of 1e-4, AdamW instead of Adam with an L2 term; the corpus of --data, and an exact model trained here"
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
        part("guess", _measure_guess, data),
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


def _measure_guess(data: Path) -> Iterable[Row]:
    """The share of the masked words of held-out documents that are guessed without context."""
    held_out = HeldOutInstances(MlmSop(data, "val"), _INSTANCES)
    value, words = guess_without_context(held_out)
    low, high = wilson(value, words)
    yield Row(
        quantity=GUESS, method="no context", value=value, low=low, high=high, repeats=words, n=held_out.data.length,
        facts={"after": "best"},
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


def _framed(rows: Sequence[Row]) -> pd.DataFrame:
    """The rows with their steps; whether each is the last of its curve, or of the best checkpoint; and their texts."""
    frame = frame_of(rows)
    frame["step"] = [math.nan if after == "best" else float(after) for after in (frame["after"] if rows else ())]
    last = frame.groupby(["method", "quantity"])["step"].transform("max")
    frame["point"] = [
        "best" if math.isnan(at) else "last" if at == end else "" for at, end in zip(frame["step"], last, strict=True)
    ]
    frame["shown"] = [_percent(row) for row in frame.itertuples()]
    return frame


def _percent(row: Any) -> str:
    return f"{100 * row.value:.1f} ± {50 * (row.high - row.low):.1f}"


def _last(rows: pd.DataFrame, quantity: str, **where: str) -> dict[str, Any]:
    """The last point of each curve, by name."""
    return by(rows, quantity, "method", point="last", **where)


def _error(row: Any, other: Any) -> float:
    """Standard error of the difference of two accuracies, from their 95 % intervals."""
    return math.hypot(row.high - row.low, other.high - other.low) / (2 * 1.96)


def _gap(row: Any, other: Any) -> Known:
    """How far the first is above the second."""
    return estimate(row.value - other.value, _error(row, other))


def _guess(rows: pd.DataFrame, quantity: str) -> float:
    """The accuracy of a guess without a model."""
    return 0.5 if quantity == SOP else next((row.value for row in each(rows, GUESS)), _MOST_GUESSED)


def _learned(rows: pd.DataFrame, quantity: str, names: Sequence[str]) -> bool:
    """Whether all these trainings are present and above the guess."""
    last, guess = _last(rows, quantity), _guess(rows, quantity)
    return all(name in last and last[name].low > guess + MARGIN for name in names)


def _numbers(rows: pd.DataFrame, quantity: str, names: Sequence[str]) -> str:
    last = _last(rows, quantity)
    said = [f"{name} {last[name].shown} %" if name in last else f"{name} was not measured" for name in names]
    at_guess = [name for name in names if name in last and not _learned(rows, quantity, (name,))]
    known = "" if quantity == SOP or each(rows, GUESS) else "at most "
    guess = f" No better than a guess of {known}{100 * _guess(rows, quantity):.1f} %: {', '.join(at_guess)}."
    skip = f" Without the convolution of the values {last[_NO_SKIP].shown} %." if _NO_SKIP in last else ""
    return f"{', '.join(said)}.{guess if at_guess else ''}{skip}"


def _near(quantity: str, ours: str, other: str, rows: pd.DataFrame, *, both: bool = False) -> Answer:
    """Whether one accuracy is competitive with another; with `both`, whether each is with the other."""
    last, agrees = _last(rows, quantity), None
    if _learned(rows, quantity, (ours, other)):
        gap = last[ours].value - last[other].value
        agrees = is_competitive(-abs(gap) if both else gap, _error(last[ours], last[other]))
    return agrees, _numbers(rows, quantity, (ours, other))


def _above(quantity: str, ours: str, others: Sequence[str], rows: pd.DataFrame) -> Answer:
    """Whether an accuracy is above all of some others; False where it is below one."""
    last, agrees = _last(rows, quantity), None
    if _learned(rows, quantity, (ours, *others)):
        agrees = holds_for_share(_gap(last[ours], last[other]).above(0) for other in others)
    return agrees, _numbers(rows, quantity, (ours, *others))


def _faster(quantity: str, rows: pd.DataFrame) -> Answer:
    """Whether half the steps from the exact model are competitive with all steps from scratch."""
    last = _last(rows, quantity)
    numbers = _numbers(rows, quantity, (_FROM_EXACT, "nystrom", "softmax"))
    if not {_FROM_EXACT, "nystrom"} <= last.keys():
        return None, numbers
    ours, other = last[_FROM_EXACT], last["nystrom"]
    equal = each(rows, quantity, method="nystrom", step=ours.step)
    numbers += f" The former took {ours.step:.0f} steps, the latter {other.step:.0f}"
    numbers += f" ({equal[0].shown} % after as many)." if equal else "."
    if not all(_learned(rows, of, ("softmax",)) for of in _TITLES):
        return None, f"{numbers} The exact model has not learned both."
    if not _learned(rows, quantity, ("nystrom",)):
        return None, numbers
    slower = bool(equal) and _gap(ours, equal[0]).above(0) is False
    caught_up = is_competitive(ours.value - other.value, _error(ours, other))
    return True if caught_up else False if slower else None, numbers


_COMPETITIVE = {
    quantity: Claim(
        f"Nyström attention is competitive to standard self-attention: {what}.",
        partial(_near, quantity, "nystrom", "softmax"),
        "Nyströmformer, Fig. 5 and 6",
    )
    for quantity, what in _TITLES.items()
}


def _beside_exact(quantity: str, rows: pd.DataFrame) -> list[Claim]:
    """Fig. 6 at the paper's size, that of the base models; the runs of the small size are those of Fig. 5."""
    small = len(_last(rows, quantity)) == len(_last(rows, quantity, preset=_SMALL["preset"]))
    return [] if small else [_COMPETITIVE[quantity]]


_study = partial(
    declare,
    framed=_framed,
    tables=[
        Pivot(
            title="held-out documents, accuracies after the last step",
            index={"attention": "{method}"},
            columns=[
                Cells("n", MLM, "{n}", point="last"),
                Cells("steps", MLM, "{after}", point="last"),
                Cells("MLM %", MLM, "{shown}", point="last"),
                Cells("SOP %", SOP, "{shown}", point="last"),
                Cells("perpl.", "validation perplexity", "{value:.1f}"),
                Cells("MB", "peak memory", "{value:.0f}"),
            ],
        )
    ],
    figures={
        "": Lines(
            of={"point": ("", "last")}, names={"quantity": _TITLES}, over="step", panel="{quantity}", scale=100,
            x_label="step", y_label="held-out accuracy, %", band="95 % intervals",
            options={"line": "single runs", "log_x": False, "log_y": False, "share_y": False},
        )
    },

)  # fmt: skip

STUDIES = {
    "nystromformer-figure-5": _study(
        shows="MLM and SOP of small models over the steps",
        source="Nyströmformer, arXiv:2102.03902, Fig. 5",
        needs="--data with mlm",
        paper_needs="about 10 hours on an A100",
        trains=True,
        plan=_figure_5,
        claims=[
            claim
            for quantity, what in _TITLES.items()
            for claim in (
                _COMPETITIVE[quantity],
                Claim(
                    f"It outperforms Linformer and linear attention: {what}.",
                    partial(_above, quantity, "nystrom", _OTHERS), "Nyströmformer, Fig. 5",
                ),
            )
        ],
    ),
    "nystromformer-figure-6": _study(
        shows="MLM and SOP of base models over the steps",
        source="Nyströmformer, arXiv:2102.03902, Fig. 6",
        needs="--data with mlm",
        paper_needs="--model with a trained BERT-base, about 190 hours on an A100",
        trains=True,
        plan=_figure_6,
        claims=[
            claim
            for quantity, what in _TITLES.items()
            for claim in (
                partial(_beside_exact, quantity),
                Claim(
                    f"Starting from the trained exact model speeds up training: {what}.", partial(_faster, quantity),
                    "Nyströmformer, Fig. 6",
                ),
            )
        ],
    ),
    "supplement-figure-5": _study(
        shows="MLM and SOP with 1,024 tokens",
        source="Nyströmformer, supplement, Fig. 5",
        needs="--data with mlm",
        paper_needs="about 45 hours on an A100",
        trains=True,
        plan=_longer,
        claims=[
            Claim(
                f"On longer sequences the accuracy is the same: {_TITLES[MLM]}.",
                partial(_near, MLM, _LONGER, _SAME, both=True), "Nyströmformer, supplement, (C)",
            ),
            Claim(
                f"On longer sequences the accuracy rises: {_TITLES[SOP]}.", partial(_above, SOP, _LONGER, (_SAME,)),
                "Nyströmformer, supplement, (C)",
            ),
        ],
    ),
}  # fmt: skip
