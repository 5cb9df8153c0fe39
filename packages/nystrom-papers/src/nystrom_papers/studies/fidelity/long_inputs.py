r"""An encoder on long texts, with exact attention, Nyström attention and near_far: error and time at each length.

The encoder has its table of positions stretched to the length n (`nystrom convert`), and reads windows of running text.
near_far is as `nystrom convert --attention near_far` makes it: sizes of `near_far_sizes(n, selects=False)`, and exact
attention up to 1,024 tokens. Rows hold

- the relative error of the attention's output, $\|\tilde Y - Y\|_F / \|Y\|_F$ of a head, on the inputs of the layers in
  the exact encoder: the mean over layers, heads and texts, and the quartiles;
- the relative error of the hidden states after the last layer, over all texts;
- time and memory of a forward pass on one text, of the attention of the middle layer and of the whole encoder, all
  methods in turn: the median and the quartiles over the rounds, and the ratio to exact attention within a round;
- for the package nystrom-attention with its default number of landmarks, where it is installed, the error of the output
  and the time and memory of the attention;
- times of near_far with its default options on short sequences of random tokens, forward and in training: compared with
  fused exact attention, and, in batches of mixed lengths, with near_far that approximates short sequences too
  (`exact_up_to=0`);
- both errors of near_far with a stretched and with a repeated table of positions, each against exact attention with the
  same table, before any fine-tuning.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import pandas as pd
import torch

from nystrom.attention.methods.near_far import near_far_attention
from nystrom.inspection.candidates import Candidate, read_candidates
from nystrom.integrations.layer_calls import LayerCall, attend_by, intercepted
from nystrom.models.positions import Lengthening
from nystrom.shapes import Masks
from nystrom_lab.data.language.encoder_texts import load_encoder
from nystrom_lab.measure.rows import Row
from nystrom_lab.report.plots.canvas import COLUMN, figure_of, method_look
from nystrom_lab.report.table import Table
from nystrom_lab.training.run_progress import no_file_bars
from nystrom_papers.studies.fidelity.beside_exact import (
    ERROR,
    MEMORY,
    PASSES,
    RATIO,
    TIME,
    Attention,
    relative_error,
    time_calls,
    time_passes,
)
from nystrom_papers.studies.reproduce.declared import Answer, Cells, Claim, Pivot, by, declare, each
from nystrom_papers.studies.reproduce.encoders import Encoder, Recording, find_encoder
from nystrom_papers.studies.reproduce.known import Known, holds_for_share, mean_of, quartiles_of, roughly
from nystrom_papers.studies.reproduce.rules import all_within
from nystrom_papers.studies.reproduce.spread import spread_row
from nystrom_papers.studies.reproduce.study import Figures, Part, Plan, Setting, beside_none, part

EXACT, OURS = "softmax", "near_far"
METHODS = (EXACT, "nystrom-64", "nystrom-256", OURS)
# The attention of another package, which is not put into the encoder.
PACKAGE = "nystrom-attention-256"
LENGTHS, ROUNDS = (512, 1024, 2048, 4096, 8192), 7
SHORT_ROUNDS = {"small": 11, "paper": 51}
HIDDEN = "relative error of the hidden states"
PLACES = ("attention", "encoder")
# The lines of the figure, and their names there.
_SHOWN = {EXACT: "exact attention", PACKAGE: "nystrom-attention", OURS: OURS, "nystrom-64": "nystrom-64"}
SHORT, MIXED, APPROXIMATE = "short inputs", "mixed lengths", "near_far, exact_up_to=0"
# Tokens of short inputs, a batch for each; and of the sequences in each batch that is padded to its longest.
SHORT_LENGTHS, MIXED_LENGTHS = (256, 512, 1024), ((256, 512, 768, 1024), (256, 512, 1024, 4096))
_AT_MOST = {SHORT: ("exact", 1.05), MIXED: (APPROXIMATE, 1.1)}
# near_far is exact up to so many tokens.
_EXACT_UP_TO = 1024
_HOW = get_args(Lengthening)


def _plan(setting: Setting) -> Plan:
    encoder = find_encoder(setting)
    lengths, texts = (LENGTHS, 8) if setting.size == "paper" else (LENGTHS[:-2], 2)
    encoder.check_length(max(lengths), texts)
    parts = [
        *(Part(f"errors-n={n}", partial(_measure_errors, encoder, n, texts)) for n in lengths),
        *(Part(f"times-n={n}", partial(_measure_times, encoder, n)) for n in lengths),
        *(
            Part(f"positions-n={n}", partial(_measure_positions, encoder, n, texts))
            for n in lengths
            if n > _EXACT_UP_TO
        ),
        part("short", _measure_short, SHORT_ROUNDS[setting.size]),
    ]
    rounds = f"{ROUNDS}, of short inputs {SHORT_ROUNDS[setting.size]}"
    said = encoder.in_words(lengths=lengths, methods=METHODS, sequences=texts, rounds=rounds)
    left_out = f"{texts} texts instead of 8, to 2,048 tokens instead of 8,192, fewer rounds of short inputs"
    return Plan(parts, said, beside_none(setting, left_out))


def _measure_errors(encoder: Encoder, n: int, texts: int, folder: Path) -> Iterable[Row]:
    """Errors of the attention's output, and of the hidden states."""
    yield from _errors(encoder.lengthened(n, folder), METHODS, n, texts, {})


def _measure_positions(encoder: Encoder, n: int, texts: int, folder: Path) -> Iterable[Row]:
    """Errors of near_far with each way of making more positions."""
    for how in _HOW:
        yield from _errors(encoder.lengthened(n, folder, how), (EXACT, OURS), n, texts, {"positions": how})


def _errors(longer: Encoder, methods: Sequence[str], n: int, texts: int, facts: Mapping[str, str]) -> Iterable[Row]:
    candidates = {each.name: each for each in read_candidates(methods, n)}
    errors: dict[str, list[torch.Tensor]] = {}
    for given in longer.record(n, texts, tuple(range(longer.layers))).values():
        calls = _calls(candidates, given)
        exact = calls[EXACT]()
        for name, call in calls.items():
            errors.setdefault(name, []).append(relative_error(call(), exact))
    shared: dict[str, Any] = {"n": n, "facts": {"layers": longer.layers, "b": texts, **facts}}
    for name, values in errors.items():
        yield spread_row(ERROR, name, torch.stack(values), seed=0, **shared)
    model, off, size = _load(longer), dict.fromkeys(candidates, 0.0), 0.0
    for ids in longer.tokens(n, texts):
        exact = _hidden(model, candidates[EXACT], ids[None])
        size += float(exact.double().square().sum())
        for name, candidate in candidates.items():
            off[name] += float((_hidden(model, candidate, ids[None]).double() - exact.double()).square().sum())
    for name, squares in off.items():
        value = math.sqrt(squares / size)
        yield Row(quantity=HIDDEN, method=name, value=value, repeats=texts, **shared)


def _measure_times(encoder: Encoder, n: int, folder: Path) -> Iterable[Row]:
    """Time and memory of one text."""
    longer = encoder.lengthened(n, folder)
    candidates = {each.name: each for each in read_candidates(METHODS, n)}
    layer = encoder.layers // 2
    given, model, ids = longer.record(n, 1, (layer,))[layer], _load(longer), encoder.tokens(n, 1)
    calls = {
        "attention": _calls(candidates, given),
        "encoder": {name: partial(_hidden, model, each, ids) for name, each in candidates.items()},
    }
    for place, of_methods in calls.items():
        facts = {"of": place, "b": 1, "threads": torch.get_num_threads()}
        yield from time_calls(of_methods, ROUNDS, beside=EXACT, memory=MEMORY, n=n, facts=facts)


def _measure_short(rounds: int) -> Iterable[Row]:
    """Times of batches of short sequences, of one length and of mixed lengths."""
    for lengths in (*((n,) * 4 for n in SHORT_LENGTHS), *MIXED_LENGTHS):
        torch.manual_seed(0)
        n, of = max(lengths), SHORT if len(set(lengths)) == 1 else MIXED
        given = [torch.randn(len(lengths), 8, n, 64, requires_grad=True) for _ in range(3)]
        keep = None if of == SHORT else torch.arange(n) < torch.tensor(lengths)[:, None]
        calls: dict[str, Attention] = {OURS: partial(near_far_attention, keep=keep)}
        if of == SHORT:
            calls[EXACT] = torch.nn.functional.scaled_dot_product_attention
        else:
            calls[APPROXIMATE] = partial(near_far_attention, keep=keep, exact_up_to=0)
        said = " ".join(map(str, dict.fromkeys(lengths)))
        facts = {"of": of, "lengths": said, "b": len(lengths), "h": 8, "d": 64, "threads": torch.get_num_threads()}
        yield from time_passes(
            calls, given, rounds, beside=list(calls)[1], what=_AT_MOST[of][0], n=n, facts=facts, seed=0
        )


def _load(encoder: Encoder) -> torch.nn.Module:
    with no_file_bars():
        return load_encoder(encoder.folder).base_model


@torch.no_grad()
def _attend(candidate: Candidate, given: Recording) -> torch.Tensor:
    return attend_by(candidate.method, LayerCall(0, "", *given, Masks(), None), candidate.options)


def _calls(candidates: Mapping[str, Candidate], given: Recording) -> dict[str, Callable[[], torch.Tensor]]:
    """The attention of each candidate; with nystrom-256, also that of the package where it is installed."""
    calls: dict[str, Callable[[], torch.Tensor]] = {
        name: partial(_attend, each, given) for name, each in candidates.items()
    }
    if "nystrom-256" in candidates and find_spec("nystrom_attention") is not None:
        calls[PACKAGE] = _package(given)
    return calls


def _package(given: Recording) -> Callable[[], torch.Tensor]:
    """`NystromAttention` of the package, without its projections and its skip."""
    from nystrom_attention import NystromAttention

    _, heads, _, width = given.q.shape
    layer = NystromAttention(heads * width, dim_head=width, heads=heads, num_landmarks=256, residual=False).eval()
    layer.add_module("to_qkv", torch.nn.Identity())
    layer.add_module("to_out", torch.nn.Identity())
    packed = torch.cat([x.transpose(1, 2).flatten(2) for x in given], dim=-1)

    @torch.no_grad()
    def attend() -> torch.Tensor:
        return layer(packed).unflatten(2, (heads, width)).transpose(1, 2)

    return attend


@torch.no_grad()
def _hidden(model: torch.nn.Module, candidate: Candidate, ids: torch.Tensor) -> torch.Tensor:
    with intercepted(model, lambda call: attend_by(candidate.method, call, candidate.options)):
        return model(input_ids=ids)[0]


def _hidden_known(row: Any) -> Known:
    """One error over all texts has no spread: it is known to a twentieth of itself."""
    return roughly(row.value, 0.05)


def _positions(rows: pd.DataFrame) -> Answer:
    """Both errors at the lengths that both kinds of positions have."""
    nearer, said = [], []
    for quantity, known in ((ERROR, mean_of), (HIDDEN, _hidden_known)):
        curves = {how: dict(sorted(by(rows, quantity, "n", method=OURS, positions=how).items())) for how in _HOW}
        nearer += [
            known(row).over(known(curves["repeat"][n])).within(most=1)
            for n, row in curves["interpolate"].items()
            if n in curves["repeat"]
        ]
        said += [
            f"{quantity.removeprefix('relative error of the ')}, {how}: "
            f"{'; '.join(f'n = {n}: {row.value:.3f}' for n, row in of.items())}."
            for how, of in curves.items()
            if of
        ]
    return holds_for_share(nearer), " ".join(said)


def _short(rows: pd.DataFrame) -> list[Any]:
    """near_far's ratios on short sequences."""
    ratios = [f"{time} / {what}" for time in PASSES.values() for what, _ in _AT_MOST.values()]
    return each(rows, ratios, method=OURS, of=[*_AT_MOST])


def _by_pass(rows: pd.DataFrame) -> list[Table]:
    lines = [
        [row.of, row.lengths, row.quantity.partition(" /")[0], f"{row.value:.2f}", f"{row.low:.2f} to {row.high:.2f}"]
        for row in _short(rows)
    ]
    title = "near_far of short sequences, time beside exact attention, and of mixed ones beside exact_up_to=0"
    return [Table(title, ["", "tokens", "", "ratio", "quartiles"], lines)]


def _quick(rows: pd.DataFrame) -> Answer:
    short = _short(rows)
    said = "; ".join(f"{row.of}, {row.lengths}, {row.quantity.partition(' /')[0]}: {row.value:.2f}" for row in short)
    return holds_for_share(
        quartiles_of(row).within(most=_AT_MOST[row.of][1]) for row in short
    ), f"{said or 'Not measured'}."


def _figures(rows: pd.DataFrame, folder: Path) -> Figures:
    """Time of attention over the length, one column wide; each line is named at its end, with its error there."""
    errors = by(rows, ERROR, "method", "n")
    figure = figure_of(COLUMN, 3.2)
    axes = figure.subplots()
    longest = 0
    for name, shown in _SHOWN.items():
        points = sorted((row.n, row.value) for row in each(rows, TIME, method=name, of="attention"))
        if not points:  # The package was not installed.
            continue
        look, end = method_look(name), points[-1]
        longest = max(longest, end[0])
        axes.plot(*zip(*points, strict=True), color=look.colour, linestyle=look.line, marker=look.marker)
        place = {"xytext": (6, 0), "textcoords": "offset points", "va": "center", "annotation_clip": False}
        said = f"{shown}\nerror {errors[name, end[0]].value:.2f}"
        axes.annotate(said, end, **place, color=look.colour, fontsize=8.5)
    axes.set(xlabel="tokens", ylabel="time of attention, ms", xticks=[longest // 4 * part for part in range(5)])
    return {"": figure}


def _beside(title: str, quantity: str, place: str) -> Pivot:
    """Error and time of each method beside exact attention, over the length."""
    time = Cells("time", RATIO, "{value:.2f}", of=place)
    return Pivot(
        title=title, index={"method": "{method}"}, names={"method": (*METHODS[1:], PACKAGE)}, missing=" / ",
        columns=[Cells("n = {n}", quantity, "{value:.2f} / {time}", beside=[time], positions="")],
    )  # fmt: skip


STUDIES = {
    "long-inputs": declare(
        shows="an encoder on texts beyond its 512 tokens: error, time and memory at each length",
        source="this library",
        needs="an encoder: nystrom[real] or --model",
        minutes=3,
        plan=_plan,
        tables=[
            Pivot(
                title="", index={"n": "{n}", "method": "{method}"}, missing="",
                columns=[
                    Cells("error of attention", ERROR, "{value:.3f}", positions=""),
                    Cells("of the hidden states", HIDDEN, "{value:.3f}", positions=""),
                    *(
                        Cells(f"{place}: {what}", quantity, text, of=place)
                        for place in PLACES
                        for what, quantity, text in (
                            ("ms", TIME, "{short}"), ("/ exact", RATIO, "{value:.2f}"), ("MB", MEMORY, "{short}")
                        )
                    ),
                ],
            ),
            _beside("the whole encoder, error of the hidden states / time beside exact attention", HIDDEN, "encoder"),
            Pivot(
                title="near_far before any fine-tuning, by positions", index={"n": "{n}"},
                columns=[
                    Cells(f"{what}, {how}", quantity, "{value:.3f}", method=OURS, positions=how)
                    for what, quantity in (("attention", ERROR), ("hidden states", HIDDEN))
                    for how in _HOW
                ],
            ),
            _by_pass,
            _beside("the attention of one layer, error of its output / time beside exact attention", ERROR, PLACES[0]),
        ],
        claims=[
            Claim(
                "near_far's attention is at most .13 off up to 4,096 tokens, .16 at 8,192.",
                all_within(
                    ERROR, mean_of, "n = {n}: {value:.3f}", method=OURS, positions="",
                    limit=lambda row: 0.13 if row.n <= 4096 else 0.16,
                ),
            ),
            Claim(
                "The hidden states are at most .20 off at 2,048 tokens.",
                all_within(
                    HIDDEN, _hidden_known, "n = {n}: {value:.3f}", method=OURS, positions="",
                    limit=lambda row: 0.2 if row.n == 2048 else math.inf,
                ),
            ),
            Claim(
                "near_far takes at most 1.05 of exact attention's time up to 1,024 tokens, and less beyond.",
                all_within(
                    RATIO, quartiles_of, "n = {n}: {value:.2f}", method=OURS, of="attention",
                    limit=lambda row: 1.05 if row.n <= _EXACT_UP_TO else 1.0,
                ),
            ),
            Claim(
                "Beyond 1,024 tokens near_far is nearer to exact attention with stretched positions than repeated "
                "ones.",
                _positions,
            ),
            Claim(
                "Short sequences take at most 1.05 of exact attention's time, forward and in training; batches of "
                "mixed lengths at most 1.1 of near_far's time with exact_up_to=0.",
                _quick,
            ),
        ],
        figures=_figures,
    )
}  # fmt: skip
