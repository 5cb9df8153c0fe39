r"""How close each method comes to exact attention on real queries, keys and values, against the time that it takes.

- The error of a head is $\|\tilde Y - Y\|_F / \|Y\|_F$ of its output against that of exact attention. It is measured on
  all heads of an encoder over windows of prose; for windows longer than the encoder's positions, the table of positions
  is stretched (`nystrom convert`). A row has the mean over layers, heads and texts, and the quartiles.
- Time is that of a forward pass on the middle layer of one text, all methods in turn. Rows have the median and the
  quartiles over the rounds, and the ratio to fused exact attention within a round.
- "rank 64" is the attention matrix truncated to its 64 largest singular values. No matrix of that rank is
  nearer to the attention matrix; another one may still give a nearer output.
- Linformer is left out: its projection has to be learned.
"""

import math
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from nystrom.attention.fused import softmax_rows
from nystrom.attention.heads import build_attention
from nystrom.attention.method_names import read_method, reformer_buckets, split_name
from nystrom_lab.measure.rows import Row
from nystrom_lab.report.table import Table
from nystrom_papers.studies.fidelity.beside_exact import ERROR, RATIO, TIME, relative_error, time_calls
from nystrom_papers.studies.reproduce.declared import Answer, Cells, Claim, Lines, Pivot, by, declare, only
from nystrom_papers.studies.reproduce.encoders import Encoder, Recording, find_encoder
from nystrom_papers.studies.reproduce.known import holds_for_share, mean_of, quartiles_of
from nystrom_papers.studies.reproduce.rules import all_ratios, all_within
from nystrom_papers.studies.reproduce.spread import spread_row
from nystrom_papers.studies.reproduce.study import Part, Plan, Setting, beside_none

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


def _plan(setting: Setting) -> Plan:
    encoder = find_encoder(setting)
    lengths, windows = (512, 1024, 2048, 4096), (10 if setting.size == "paper" else 2)
    encoder.check_length(max(lengths), windows)
    layers = tuple(range(encoder.layers))
    parts = [
        *(Part(f"errors-n={n}", partial(_measure_errors, encoder, layers, n, windows)) for n in lengths),
        *(Part(f"times-n={n}", partial(_measure_times, encoder, encoder.layers // 2, n)) for n in lengths),
    ]
    said = encoder.in_words(lengths=lengths, methods=METHODS, sequences=windows, rounds=_ROUNDS)
    return Plan(parts, said, beside_none(setting, f"{windows} texts instead of 10"))


def _measure_errors(encoder: Encoder, layers: tuple[int, ...], n: int, windows: int, folder: Path) -> Iterable[Row]:
    errors: dict[str, list[Float[Tensor, "b h"]]] = {}
    for given in encoder.lengthened(n, folder).record(n, windows, layers).values():
        exact = build("softmax", given)(*given)
        for method in METHODS:
            errors.setdefault(method, []).append(relative_error(_attend(method, given), exact))
        if n == min(512, encoder.positions):
            errors.setdefault(CUT, []).append(relative_error(cut_to_rank(given, _RANK), exact))
    for method, values in errors.items():
        yield spread_row(ERROR, method, torch.stack(values), n=n, facts={"layers": len(layers), "b": windows}, seed=0)


def _measure_times(encoder: Encoder, layer: int, n: int, folder: Path) -> Iterable[Row]:
    given = encoder.lengthened(n, folder).record(n, 1, (layer,))[layer]
    calls = {method: partial(_forward, build(method, given), given) for method in (EXACT, *METHODS)}
    facts = {"b": 1, "h": given.q.shape[1], "d": given.q.shape[3], "threads": torch.get_num_threads()}
    yield from time_calls(calls, _ROUNDS, beside=EXACT, n=n, facts=facts, seed=0)


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


def _equal(rows: pd.DataFrame) -> list[Table]:
    """The nearest size of each family among the methods that take no longer than near_far."""
    lines = []
    for n, ours in sorted(by(rows, TIME, "n", method=OURS).items()):
        times, errors = by(rows, TIME, "method", n=n), by(rows, ERROR, "method", n=n)
        within = [name for name, time in times.items() if name in errors and time.value <= ours.value]
        for family in dict.fromkeys(split_name(name)[0] for name in within):
            name = min((x for x in within if split_name(x)[0] == family), key=lambda x: errors[x].value)
            lines.append([str(n), name, f"{times[name].value:.1f}", f"{errors[name].value:.3f}"])
    title = f"the nearest of each family in at most the time of {OURS}"
    return [Table(title, ["n", "method", "ms", "error"], lines, 2)]


def _half(rows: pd.DataFrame) -> Answer:
    """Less than half the error of nystrom-256 in less time, at every length."""
    error = all_ratios(ERROR, mean_of, "n = {at}: {ratio:.2f} of its error", OURS, "nystrom-256", limit=0.5)(rows)
    time = all_ratios(TIME, quartiles_of, "{ratio:.2f} of its time", OURS, "nystrom-256", limit=1)(rows)
    parts = zip(*(said.rstrip(".").split("; ") for _, said in (error, time)), strict=False)
    return holds_for_share([error[0], time[0]]), f"{'; '.join(map(', '.join, parts))}."


def _beside_cut(rows: pd.DataFrame) -> Answer:
    ours, cut = (only(rows, ERROR, method=name, n=512) for name in (OURS, CUT))
    return mean_of(ours).over(mean_of(cut)).within(most=1), f"{ours.value:.3f} against {cut.value:.3f} at 512 tokens."


def _off(name: str, limit: float) -> Claim:
    rule = all_within(ERROR, mean_of, "mean relative error {value:.3f}", limit=lambda _: limit, method=name, n=512)
    return Claim(f"{name} is at most {limit:g} off exact attention at 512 tokens.", rule)


STUDIES = {
    "near-far": declare(
        shows="error over time of every method on real queries, keys and values",
        source="this library",
        needs="an encoder: nystrom[real] or --model",
        minutes=1.7,
        plan=_plan,
        tables=[
            Pivot(
                title="relative error / time beside exact attention", index={"method": "{method}"}, missing="",
                columns=[Cells("n={n}", ERROR, "{value:.3f}{ratio}", beside=[Cells("ratio", RATIO, " / {value:.2f}")])],
            ),
            _equal,
        ],
        claims=[
            _off(OURS, 0.115),
            _off(LARGE, 0.065),
            Claim("near_far has less than half the error of nystrom-256, in less time.", _half),
            Claim("near_far is nearer than the attention matrix cut to rank 64.", _beside_cut),
            Claim(
                "near_far is faster than fused exact attention from 1,024 tokens on.",
                all_within(
                    RATIO, quartiles_of, "n = {n}: {value:.2f} of its time", method=OURS,
                    limit=lambda row: 1.0 if row.n >= 1024 else math.inf,
                ),
            ),
        ],
        figures={
            "": Lines(
                of={"quantity": ERROR}, over=RATIO, panel="n = {n}", line="{family}", x_label=RATIO, y_label=ERROR,
                band="",
            )
        },
    )
}  # fmt: skip
