r"""How close each method comes to exact attention on real queries, keys and values, against the time that it takes.

- The error of a head is $\|\tilde Y - Y\|_F / \|Y\|_F$ of its output against that of exact attention. It is measured on
  all heads of an encoder over windows of prose; for windows longer than the encoder's positions, the table of positions
  is stretched (`nystrom convert`). A row has the mean over layers, heads and texts, and the quartiles.
- Time is that of a forward pass on the middle layer of one text, all methods in turn. Rows have the median and the
  quartiles over the rounds, and the ratio to fused exact attention within a round.
- "rank 64" is the attention matrix truncated to its 64 largest singular values. Of all matrices of that rank it is the
  nearest to the attention matrix; another one may still give a nearer output.
- Linformer is left out: its projection has to be learned.

Claims of this library, and the rules that decide them, by what is known of means over heads and of medians over rounds
(`nystrom_lab.studies.reproduce.known`):

- At 512 tokens the mean error of near_far is at most .115 with its default sizes, and at most .065 with 128 heavy keys
  and 128 clusters.
- At every length near_far has at most half the error of Nyström attention with 256 landmarks, in less time.
- At 512 tokens near_far is nearer to exact attention than the attention matrix truncated to rank 64.
- near_far is faster than fused exact attention from 1,024 tokens on.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from nystrom.attention.fused import softmax_rows
from nystrom.attention.heads import build_attention
from nystrom.attention.method_names import read_method, reformer_buckets, split_name
from nystrom.clock import seconds
from nystrom.turns import in_turns
from nystrom_lab.measure.rows import Row, cpu_name
from nystrom_lab.measure.timing import timed_rows
from nystrom_lab.report.plots.canvas import PAGE, figure_of, method_look, plain_numbers
from nystrom_lab.report.summary import Verdict
from nystrom_lab.report.table import Table
from nystrom_lab.studies.reproduce.encoders import Encoder, Recording, find_encoder
from nystrom_lab.studies.reproduce.known import mean_of, most, quartiles_of
from nystrom_lab.studies.reproduce.spread import spread_row
from nystrom_lab.studies.reproduce.study import Part, Plan, Setting, Study, beside_none

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EXACT, OURS, LARGE, CUT = "softmax", "near_far", "near_far-128", "rank 64"
METHODS = (
    *("near_far-16", "near_far-32", OURS, LARGE),
    *(f"nystrom-{m}" for m in (32, 64, 128, 256)),
    *(f"skyformer_softmax-{m}" for m in (64, 256)),
    *(f"performer-{m}" for m in (64, 256)),
    *(f"longformer-{m}" for m in (65, 129, 257)),
    *("informer-64", "informer-256", "bigbird-3", "reformer-4"),
)  # fmt: skip
_ROUNDS, _RANK = 7, 64
_ERROR, _TIME, _RATIO = "relative error of the output", "forward time", "forward time / exact"
_CPU = torch.device("cpu")


def _plan(setting: Setting) -> Plan:
    encoder = find_encoder(setting)
    lengths, windows = (512, 1024, 2048, 4096), (10 if setting.size == "paper" else 2)
    encoder.check_length(max(lengths), windows)
    layers = tuple(range(encoder.layers))
    parts = [
        *(Part(f"errors-n={n}", partial(_measure_errors, encoder, layers, n, windows)) for n in lengths),
        *(Part(f"times-n={n}", partial(_measure_times, encoder, encoder.layers // 2, n)) for n in lengths),
    ]
    said = {
        "model": encoder.name,
        "texts": encoder.prose.name,
        "lengths": " ".join(map(str, lengths)),
        "methods": " ".join(METHODS),
        "sequences": str(windows),
        "rounds": str(_ROUNDS),
    }
    return Plan(parts, said, beside_none(setting, f"{windows} texts instead of 10"))


def _measure_errors(encoder: Encoder, layers: tuple[int, ...], n: int, windows: int, folder: Path) -> Iterable[Row]:
    errors: dict[str, list[Float[Tensor, "b h"]]] = {}
    for given in encoder.lengthened(n, folder).record(n, windows, layers).values():
        exact = build("softmax", given)(*given)
        for method in METHODS:
            errors.setdefault(method, []).append(_error(_attend(method, given), exact))
        if n == min(512, encoder.positions):
            errors.setdefault(CUT, []).append(_error(cut_to_rank(given, _RANK), exact))
    for method, values in errors.items():
        yield spread_row(_ERROR, method, torch.stack(values), n=n, facts={"layers": len(layers), "b": windows}, seed=0)


def _measure_times(encoder: Encoder, layer: int, n: int, folder: Path) -> Iterable[Row]:
    given = encoder.lengthened(n, folder).record(n, 1, (layer,))[layer]
    calls = {method: partial(_forward, build(method, given), given) for method in (EXACT, *METHODS)}
    times = in_turns({method: partial(seconds, call, _CPU) for method, call in calls.items()}, _ROUNDS)
    shared: dict[str, Any] = {
        "n": n, "device": cpu_name(), "seed": 0,
        "facts": {"b": 1, "h": given.q.shape[1], "d": given.q.shape[3], "threads": torch.get_num_threads()},
    }  # fmt: skip
    for method, taken in times.items():
        yield from timed_rows(method, taken, times[EXACT], (_TIME, _RATIO), **shared)


def build(name: str, given: Recording) -> torch.nn.Module:
    """A method for these heads; its weights, if it has any, are drawn from seed 0."""
    method, options = read_method(name)
    if method == "reformer":
        options |= {"num_buckets": reformer_buckets(given.k.shape[2]), "shared_qk": False}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build_attention(method, num_heads=given.q.shape[1], head_dim=given.q.shape[3], **options).eval()


def _attend(name: str, given: Recording) -> Float[Tensor, "b h n e"]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return _forward(build(name, given), given)


@torch.no_grad()
def _forward(heads: torch.nn.Module, given: Recording) -> Float[Tensor, "b h n e"]:
    return heads(*given)


def cut_to_rank(given: Recording, rank: int) -> Float[Tensor, "b h n e"]:
    """The output of the attention matrices truncated to their largest singular values."""
    u, s, vt = torch.linalg.svd(softmax_rows(given.q, given.k).double(), full_matrices=False)
    cut = (u[..., :rank] * s[..., None, :rank]) @ (vt[..., :rank, :] @ given.v.double())
    return cut.to(given.v.dtype)


def _error(found: Float[Tensor, "b h n e"], exact: Float[Tensor, "b h n e"]) -> Float[Tensor, "b h"]:
    return (found - exact).flatten(2).norm(dim=2) / exact.flatten(2).norm(dim=2)


def _values(rows: Sequence[Row], quantity: str) -> dict[int, dict[str, Row]]:
    """Rows of a quantity by length and method."""
    found: dict[int, dict[str, Row]] = {}
    for row in rows:
        if row.quantity == quantity and row.n is not None:
            found.setdefault(row.n, {})[row.method] = row
    return found


def _tables(rows: Sequence[Row]) -> Sequence[Table]:
    errors, times, ratios = (_values(rows, quantity) for quantity in (_ERROR, _TIME, _RATIO))
    lengths = sorted(errors)
    methods = list(dict.fromkeys(name for each in errors.values() for name in each))
    cells = [
        [name]
        + [
            f"{errors[n][name].value:.3f}" + (f" / {ratios[n][name].value:.2f}" if name in ratios.get(n, {}) else "")
            if name in errors[n]
            else ""
            for n in lengths
        ]
        for name in methods
    ]
    whole = Table("relative error / time beside exact attention", ["method", *(f"n={n}" for n in lengths)], cells)
    lines = []
    for n in lengths:
        if OURS not in times.get(n, {}):
            continue
        limit = times[n][OURS].value
        # The nearest size of each family within the time.
        within = [name for name in times[n] if name in errors[n] and times[n][name].value <= limit]
        for family in dict.fromkeys(split_name(name)[0] for name in within):
            those = [name for name in within if split_name(name)[0] == family]
            name = min(those, key=lambda each: errors[n][each].value)
            lines.append([str(n), name, f"{times[n][name].value:.1f}", f"{errors[n][name].value:.3f}"])
    equal = Table(f"the nearest of each family in at most the time of {OURS}", ["n", "method", "ms", "error"], lines, 2)
    return [whole, equal]


def _verdicts(rows: Sequence[Row]) -> Sequence[Verdict]:
    errors, times, ratios = (_values(rows, quantity) for quantity in (_ERROR, _TIME, _RATIO))
    at_512, found = errors.get(512, {}), []
    for name, limit in ((OURS, 0.115), (LARGE, 0.065)):
        row = at_512.get(name)
        said = "not measured at 512 tokens." if row is None else f"mean relative error {row.value:.3f}."
        agrees = None if row is None else mean_of(row).within(most=limit)
        found.append(Verdict(f"{name} is at most {limit:g} off exact attention at 512 tokens.", agrees, said))
    both = sorted(n for n in errors if n in times and {OURS, "nystrom-256"} <= errors[n].keys() & times[n].keys())
    half, parts = [], []
    for n in both:
        (error, other), (time, longer) = ((of[n][OURS], of[n]["nystrom-256"]) for of in (errors, times))
        half += [
            mean_of(error).over(mean_of(other)).within(most=0.5),
            quartiles_of(time).over(quartiles_of(longer)).within(most=1),
        ]
        parts.append(
            f"n = {n}: {error.value / other.value:.2f} of its error, {time.value / longer.value:.2f} of its time"
        )
    said = f"{'; '.join(parts)}." if parts else "not measured."
    found.append(Verdict("near_far has less than half the error of nystrom-256, in less time.", most(half), said))
    if {OURS, CUT} <= at_512.keys():
        ours, cut = at_512[OURS], at_512[CUT]
        said = f"{ours.value:.3f} against {cut.value:.3f} at 512 tokens."
        agrees = mean_of(ours).over(mean_of(cut)).within(most=1)
        found.append(Verdict("near_far is nearer than the attention matrix cut to rank 64.", agrees, said))
    faster = {n: row[OURS] for n, row in sorted(ratios.items()) if OURS in row}
    said = "; ".join(f"n = {n}: {row.value:.2f} of its time" for n, row in faster.items())
    agrees = most(quartiles_of(row).within(most=1) for n, row in faster.items() if n >= 1024)
    claim = "near_far is faster than fused exact attention from 1,024 tokens on."
    found.append(Verdict(claim, agrees, f"{said or 'not measured'}."))
    return found


def _figures(rows: Sequence[Row], folder: Path) -> "Mapping[str, Figure]":
    errors, times = _values(rows, _ERROR), _values(rows, _TIME)
    lengths = [n for n in sorted(errors) if n in times]
    columns = min(2, len(lengths))
    figure = figure_of(PAGE, 0.9 + 2.4 * -(-len(lengths) // max(1, columns)))
    grid = figure.subplots(-(-len(lengths) // columns), columns, squeeze=False, sharey=True)
    shown: dict[str, Any] = {}
    for axes, n in zip(grid.flat, lengths, strict=False):
        families: dict[str, list[tuple[float, float]]] = {}
        for name, row in errors[n].items():
            if name in times[n]:
                families.setdefault(split_name(name)[0], []).append((times[n][name].value, row.value))
        for family, points in families.items():
            look = method_look(family)
            xs, ys = zip(*sorted(points), strict=True)
            (line,) = axes.plot(xs, ys, color=look.colour, linestyle=look.line, marker=look.marker)
            shown.setdefault(family, line)
        axes.set(xscale="log", yscale="log", title=f"n = {n}")
        exact = axes.axvline(times[n][EXACT].value, color=method_look(EXACT).colour, linewidth=0.9)
        shown.setdefault("exact attention's time", exact)
        if CUT in errors[n]:
            line = axes.axhline(errors[n][CUT].value, color="0.5", linestyle=":", linewidth=0.9)
            shown.setdefault(f"best {CUT}", line)
        plain_numbers(axes, "x")
        plain_numbers(axes, "y")
        axes.grid(True)
    for axes in grid[-1]:
        axes.set_xlabel("forward time, ms")
    for axes in grid[:, 0]:
        axes.set_ylabel("relative error of the output")
    for axes in grid.flat[len(lengths) :]:
        axes.set_visible(False)
    figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=5)
    return {"": figure}


STUDIES = {
    "near-far": Study(
        shows="error over time of every method on real queries, keys and values",
        source="this library",
        needs="an encoder: nystrom[real] or --model",
        minutes=1.7,
        plan=_plan,
        tables=_tables,
        verdicts=_verdicts,
        figures=_figures,
    )
}
