r"""An encoder on long texts, with exact attention, Nyström attention and near_far: error and time at each length.

The encoder has its table of positions stretched to the length n (`nystrom convert`), and reads windows of running text.
near_far is as `nystrom convert --attention near_far` makes it: sizes of `near_far_sizes(n)`, and exact attention up to
1,024 tokens. Rows hold

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

Claims of this library, and the rules that decide them at every measured length, by what is known of means over heads
and of medians over rounds (`nystrom_lab.studies.reproduce.known`). An error of the hidden states has no spread, and is
known to a twentieth of itself.

- The mean error of near_far's attention is at most .13 up to 4,096 tokens, and at most .16 at 8,192.
- The error of near_far's hidden states is at most .20 at 2,048 tokens.
- near_far's attention takes at most 1.05 of the time of exact attention up to 1,024 tokens, and less time beyond.
- Short sequences of one length take at most 1.05 of the time of fused exact attention, forward and in training. Batches
  of mixed lengths take at most 1.1 of the time that they take with `exact_up_to=0`.
- Beyond 1,024 tokens, where near_far is not exact, both of its errors are smaller with stretched than with repeated
  positions.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import torch

from nystrom.attention.methods.near_far import near_far_attention
from nystrom.clock import peak_bytes, seconds
from nystrom.inspection.candidates import Candidate, read_candidates
from nystrom.inspection.texts import load_encoder
from nystrom.integrations.layer_calls import LayerCall, attend_by, intercepted
from nystrom.models.positions import Lengthening
from nystrom.shapes import Masks
from nystrom.turns import in_turns
from nystrom_lab.measure.rows import Row, cpu_name, new_row
from nystrom_lab.measure.timing import timed_rows
from nystrom_lab.report.plots.canvas import COLUMN, figure_of, method_look
from nystrom_lab.report.summary import Verdict
from nystrom_lab.report.table import Table
from nystrom_lab.studies.fidelity.passes import PASSES, Attention, all_hold, is_at_most, time_passes
from nystrom_lab.studies.reproduce.encoders import Encoder, Recording, find_encoder
from nystrom_lab.studies.reproduce.known import Known, mean_of, most, quartiles_of, roughly
from nystrom_lab.studies.reproduce.spread import spread_row
from nystrom_lab.studies.reproduce.study import Part, Plan, Setting, Study, beside_none
from nystrom_lab.training.run.progress import no_file_bars

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EXACT, OURS = "softmax", "near_far"
METHODS = (EXACT, "nystrom-64", "nystrom-256", OURS)
# The attention of another package, which is not put into the encoder.
PACKAGE = "nystrom-attention-256"
LENGTHS, ROUNDS = (512, 1024, 2048, 4096, 8192), 7
SHORT_ROUNDS = {"small": 11, "paper": 51}
ERROR, HIDDEN = "relative error of the output", "relative error of the hidden states"
TIME, RATIO, MEMORY = "forward time", "forward time / exact", "forward memory"
PLACES = ("attention", "encoder")
# The lines of the figure, and their names there.
_SHOWN = {EXACT: "exact attention", PACKAGE: "nystrom-attention", OURS: OURS, "nystrom-64": "nystrom-64"}
SHORT, MIXED, APPROXIMATE = "short inputs", "mixed lengths", "near_far, exact_up_to=0"
# Tokens of short inputs, a batch for each; and of the sequences in each batch that is padded to its longest.
SHORT_LENGTHS, MIXED_LENGTHS = (256, 512, 1024), ((256, 512, 768, 1024), (256, 512, 1024, 4096))
_AT_MOST = {SHORT: ("exact", 1.05), MIXED: (APPROXIMATE, 1.1)}
# near_far is exact up to so many tokens.
_EXACT_UP_TO = 1024
_CPU = torch.device("cpu")


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
        Part("short", partial(_measure_short, SHORT_ROUNDS[setting.size])),
    ]
    said = {
        "model": encoder.name,
        "texts": encoder.prose.name,
        "lengths": " ".join(map(str, lengths)),
        "methods": " ".join(METHODS),
        "sequences": str(texts),
        "rounds": f"{ROUNDS}, of short inputs {SHORT_ROUNDS[setting.size]}",
    }
    left_out = f"{texts} texts instead of 8, to 2,048 tokens instead of 8,192, fewer rounds of short inputs"
    return Plan(parts, said, beside_none(setting, left_out))


def _measure_errors(encoder: Encoder, n: int, texts: int, folder: Path) -> Iterable[Row]:
    """Errors of the attention's output, and of the hidden states."""
    yield from _errors(encoder.lengthened(n, folder), METHODS, n, texts, {})


def _measure_positions(encoder: Encoder, n: int, texts: int, folder: Path) -> Iterable[Row]:
    """Errors of near_far with each way of making more positions."""
    for how in get_args(Lengthening):
        yield from _errors(encoder.lengthened(n, folder, how), (EXACT, OURS), n, texts, {"positions": how})


def _errors(longer: Encoder, methods: Sequence[str], n: int, texts: int, facts: Mapping[str, str]) -> Iterable[Row]:
    candidates = {each.name: each for each in read_candidates(methods, n)}
    errors: dict[str, list[torch.Tensor]] = {}
    for given in longer.record(n, texts, tuple(range(longer.layers))).values():
        calls = _calls(candidates, given)
        exact = calls[EXACT]()
        for name, call in calls.items():
            off = (call() - exact).flatten(2).norm(dim=2)
            errors.setdefault(name, []).append(off / exact.flatten(2).norm(dim=2))
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
        yield new_row(
            study="", quantity=HIDDEN, method=name, value=value, unit="", repeats=texts, device=cpu_name(), **shared
        )


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
        times = in_turns({name: partial(seconds, call, _CPU) for name, call in of_methods.items()}, ROUNDS)
        facts = {"of": place, "b": 1, "threads": torch.get_num_threads()}
        shared: dict[str, Any] = {"n": n, "facts": facts, "device": cpu_name()}
        for name, taken in times.items():
            yield from timed_rows(name, taken, times[EXACT], (TIME, RATIO), **shared)
            memory = peak_bytes(of_methods[name], _CPU) / 1e6
            yield new_row(study="", quantity=MEMORY, method=name, value=memory, unit="MB", **shared)


def _measure_short(rounds: int, folder: Path) -> Iterable[Row]:
    """Times of batches of short sequences, of one length and of mixed lengths."""
    del folder
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


def _found(
    rows: Sequence[Row], quantity: str, place: str | None = None, positions: str | None = None
) -> dict[tuple[int, str], Row]:
    return {
        (row.n, row.method): row
        for row in rows
        if row.quantity == quantity
        and row.n is not None
        and (place is None or row.fact("of") == place)
        and row.facts.get("positions") == positions
    }


def _of_positions(rows: Sequence[Row]) -> dict[tuple[str, str], dict[int, Row]]:
    """near_far's errors by length, for each quantity and each way of making positions."""
    return {
        (quantity, how): {
            n: row for (n, name), row in sorted(_found(rows, quantity, positions=how).items()) if name == OURS
        }
        for quantity in (ERROR, HIDDEN)
        for how in get_args(Lengthening)
    }


def _short(rows: Sequence[Row]) -> list[tuple[Row, str]]:
    """near_far's ratios on short sequences, and the timed pass of each."""
    return [
        (row, time)
        for row in rows
        for time in PASSES.values()
        if row.method == OURS
        and row.fact("of") in _AT_MOST
        and row.quantity == f"{time} / {_AT_MOST[row.fact('of')][0]}"
    ]


def _tables(rows: Sequence[Row]) -> Sequence[Table]:
    errors, hidden = _found(rows, ERROR), _found(rows, HIDDEN)
    measured = {
        (quantity, place): _found(rows, quantity, place) for quantity in (TIME, RATIO, MEMORY) for place in PLACES
    }

    def cell(found: Mapping[tuple[int, str], Row], key: tuple[int, str], digits: str) -> str:
        value = found[key].value if key in found else math.nan
        return "" if math.isnan(value) else format(value, ",.0f" if value >= 100 else digits)

    lines = [
        [
            str(key[0]),
            key[1],
            cell(errors, key, ".3f"),
            cell(hidden, key, ".3f"),
            *(
                cell(measured[quantity, place], key, digits)
                for place in PLACES
                for quantity, digits in ((TIME, ".3g"), (RATIO, ".2f"), (MEMORY, ".3g"))
            ),
        ]
        for key in sorted(errors, key=lambda key: (key[0], (*METHODS, PACKAGE).index(key[1])))
    ]
    of = [f"{place}: {what}" for place in PLACES for what in ("ms", "/ exact", "MB")]
    lengths = sorted({n for n, _ in hidden})

    def short(off: Mapping[tuple[int, str], Row], place: str) -> list[list[str]]:
        ratios = measured[RATIO, place]
        return [
            [name, *(f"{cell(off, (n, name), '.2f')} / {cell(ratios, (n, name), '.2f')}" for n in lengths)]
            for name in (*METHODS, PACKAGE)
            if any((n, name) in off for n in lengths)
        ]

    by_positions = _of_positions(rows)
    by_pass = [
        [row.fact("of"), row.fact("lengths"), time, f"{row.value:.2f}", f"{row.low:.2f} to {row.high:.2f}"]
        for row, time in _short(rows)
    ]
    return [
        Table("", ["n", "method", "error of attention", "of the hidden states", *of], lines, 2),
        Table(
            "the whole encoder, error of the hidden states / time beside exact attention",
            ["method", *(f"n = {n}" for n in lengths)],
            short(hidden, "encoder"),
        ),
        Table(
            "near_far before any fine-tuning, by positions",
            ["n", *(f"{what}, {how}" for what in ("attention", "hidden states") for how in get_args(Lengthening))],
            [
                [str(n), *(f"{of[n].value if n in of else math.nan:.3f}" for of in by_positions.values())]
                for n in sorted({n for values in by_positions.values() for n in values})
            ],
        ),
        Table(
            "near_far of short sequences, time beside exact attention, and of mixed ones beside exact_up_to=0",
            ["", "tokens", "", "ratio", "quartiles"],
            by_pass,
        ),
        Table(
            "the attention of one layer, error of its output / time beside exact attention",
            ["method", *(f"n = {n}" for n in lengths)],
            short(errors, "attention"),
        ),
    ]


def _verdicts(rows: Sequence[Row]) -> Sequence[Verdict]:
    def of_ours(found: Mapping[tuple[int, str], Row]) -> dict[int, Row]:
        return {n: row for (n, name), row in sorted(found.items()) if name == OURS}

    def said(of: Mapping[int, Row], digits: str) -> str:
        return "; ".join(f"n = {n}: {row.value:{digits}}" for n, row in of.items()) + "."

    errors, hidden = of_ours(_found(rows, ERROR)), of_ours(_found(rows, HIDDEN))
    ratios = of_ours(_found(rows, RATIO, "attention"))
    by_positions = _of_positions(rows)
    nearer = [
        known(stretched).over(known(by_positions[quantity, "repeat"][n])).within(most=1)
        for quantity, known in ((ERROR, mean_of), (HIDDEN, _hidden_known))
        for n, stretched in by_positions[quantity, "interpolate"].items()
        if n in by_positions[quantity, "repeat"]
    ]
    short = [is_at_most(row, _AT_MOST[row.fact("of")][1]) for row, _ in _short(rows)]
    said_short = "; ".join(
        f"{row.fact('of')}, {row.fact('lengths')}, {time}: {row.value:.2f}" for row, time in _short(rows)
    )
    return [
        Verdict(
            "near_far's attention is at most .13 off up to 4,096 tokens, .16 at 8,192.",
            most(mean_of(row).within(most=0.13 if n <= 4096 else 0.16) for n, row in errors.items()),
            said(errors, ".3f"),
        ),
        Verdict(
            "The hidden states are at most .20 off at 2,048 tokens.",
            _hidden_known(hidden[2048]).within(most=0.2) if 2048 in hidden else None,
            said(hidden, ".3f"),
        ),
        Verdict(
            "near_far takes at most 1.05 of exact attention's time up to 1,024 tokens, and less beyond.",
            most(quartiles_of(row).within(most=1.05 if n <= 1024 else 1) for n, row in ratios.items()),
            said(ratios, ".2f"),
        ),
        Verdict(
            "Beyond 1,024 tokens near_far is nearer to exact attention with stretched positions than repeated ones.",
            most(nearer),
            " ".join(
                f"{quantity.removeprefix('relative error of the ')}, {how}: {said(of, '.3f')}"
                for (quantity, how), of in by_positions.items()
                if of
            ),
        ),
        Verdict(
            "Short sequences take at most 1.05 of exact attention's time, forward and in training; batches of mixed "
            "lengths at most 1.1 of near_far's time with exact_up_to=0.",
            all_hold(short),
            f"{said_short or 'Not measured'}.",
        ),
    ]


def _hidden_known(row: Row) -> Known:
    return roughly(row.value, 0.05)


def _figures(rows: Sequence[Row], folder: Path) -> "Mapping[str, Figure]":
    """Time of attention over the length, one column wide; each line is named at its end, with its error there."""
    times, errors = _found(rows, TIME, "attention"), _found(rows, ERROR)
    lines = {name: sorted((n, row.value) for (n, each), row in times.items() if each == name) for name in _SHOWN}
    figure = figure_of(COLUMN, 3.2)
    axes = figure.subplots()
    for name, points in lines.items():
        if not points:  # The package was not installed.
            continue
        look, end = method_look(name), points[-1]
        axes.plot(*zip(*points, strict=True), color=look.colour, linestyle=look.line, marker=look.marker)
        said = f"{_SHOWN[name]}\nerror {errors[end[0], name].value:.2f}"
        place = {"xytext": (6, 0), "textcoords": "offset points", "va": "center", "annotation_clip": False}
        axes.annotate(said, end, **place, color=look.colour, fontsize=8.5)
    longest = max(n for n, _ in times)
    axes.set(xlabel="tokens", ylabel="time of attention, ms", xticks=[longest // 4 * part for part in range(5)])
    return {"": figure}


STUDIES = {
    "long-inputs": Study(
        shows="an encoder on texts beyond its 512 tokens: error, time and memory at each length",
        source="this library",
        needs="an encoder: nystrom[real] or --model",
        minutes=3,
        plan=_plan,
        tables=_tables,
        verdicts=_verdicts,
        figures=_figures,
    )
}
