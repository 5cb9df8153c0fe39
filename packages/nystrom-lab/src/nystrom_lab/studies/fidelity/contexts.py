r"""A context that is compressed once (`near_far_context`): error over the entries kept, and time of 100 questions.

Queries, keys and values are those of an encoder on windows of running text, used as cross-attention: no token is near.
Of n keys r entries are kept in one of three ways:

- "near_far": a sixth of the entries are heavy keys, the others are clusters;
- "near_far, asked": the same, but a sample of 64 queries decides which keys are heavy;
- "subsampled": r evenly spread keys, with exact attention to them.

A row has the relative error of the output: its mean over layers, heads and texts, and the quartiles. Times are those of
one layer for 100 questions of 16 queries each, answered by a context that is made first, by calls of
`near_far_attention` with the same sizes, and by exact attention over all keys.

Claims of this library, and the rules that decide them, at every number of entries, by what is known of means over heads
and of medians over rounds (`nystrom_lab.studies.reproduce.known`):

- "near_far" has at most half the error of as many evenly spread keys.
- 100 questions to a context take at most a tenth of the time of 100 calls of `near_far_attention`. The time to make the
  context is included.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nystrom.attention.caches.near_far_context import near_far_context
from nystrom.attention.methods.near_far import near_far_attention
from nystrom.attention.methods.softmax import softmax_attention
from nystrom.clock import seconds
from nystrom.turns import in_turns
from nystrom_lab.measure.rows import Row, cpu_name
from nystrom_lab.measure.timing import timed_rows
from nystrom_lab.report.plots.lines import draw_lines
from nystrom_lab.report.summary import Verdict
from nystrom_lab.report.table import Table
from nystrom_lab.studies.reproduce.encoders import Encoder, Recording, find_encoder
from nystrom_lab.studies.reproduce.known import Known, mean_of, most, quartiles_of
from nystrom_lab.studies.reproduce.spread import spread_row
from nystrom_lab.studies.reproduce.study import Part, Plan, Setting, Study, beside_none

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ENTRIES, LENGTH, SAMPLE, QUESTIONS, ASKED = (96, 192, 384, 768), 2048, 64, 100, 16
ROUNDS = {"small": 3, "paper": 5}
ERROR, TIME, RATIO = "relative error of the output", "time of 100 questions", "time of 100 questions / exact"
OURS, WITH_SAMPLE, SPREAD, EACH, EXACT = "near_far", "near_far, asked", "subsampled", "near_far, each time", "softmax"


def _plan(setting: Setting) -> Plan:
    encoder, texts = find_encoder(setting), 8 if setting.size == "paper" else 2
    encoder.check_length(LENGTH, texts)
    parts = [
        Part("errors", partial(_measure_errors, encoder, texts)),
        Part("times", partial(_measure_times, encoder, ROUNDS[setting.size])),
    ]
    said = {"model": encoder.name, "texts": encoder.prose.name, "tokens": str(LENGTH), "sequences": str(texts)}
    return Plan(parts, said, beside_none(setting, f"{texts} texts instead of 8, fewer turns"))


def sizes_of(entries: int) -> dict[str, Any]:
    """Numbers of heavy keys and of clusters that add up to `entries`."""
    return {"num_heavy": entries // 6, "num_clusters": entries - entries // 6}


def _answers(given: Recording, entries: int) -> dict[str, Tensor]:
    q, k, v = given
    n, sizes = k.shape[2], sizes_of(entries)
    sample, kept = (torch.linspace(0, n - 1, count).round().long() for count in (SAMPLE, entries))
    return {
        OURS: near_far_context(k, v, **sizes)(q),
        WITH_SAMPLE: near_far_context(k, v, queries=q[:, :, sample], **sizes)(q),
        SPREAD: softmax_attention(q, k[:, :, kept], v[:, :, kept]),
    }


@torch.no_grad()
def _measure_errors(encoder: Encoder, texts: int, folder: Path) -> Iterable[Row]:
    errors: dict[tuple[str, int], list[Tensor]] = {}
    for given in encoder.lengthened(LENGTH, folder).record(LENGTH, texts, tuple(range(encoder.layers))).values():
        exact = softmax_attention(*given)
        for entries in ENTRIES:
            for name, out in _answers(given, entries).items():
                off = (out - exact).flatten(2).norm(dim=2) / exact.flatten(2).norm(dim=2)
                errors.setdefault((name, entries), []).append(off)
    for (name, entries), values in errors.items():
        facts = {"layers": encoder.layers, "b": texts}
        yield spread_row(ERROR, name, torch.stack(values), n=LENGTH, m=entries, facts=facts, seed=0)


def _measure_times(encoder: Encoder, rounds: int, folder: Path) -> Iterable[Row]:
    layer = encoder.layers // 2
    q, k, v = encoder.lengthened(LENGTH, folder).record(LENGTH, 1, (layer,))[layer]
    asked, keep = q[:, :, :ASKED], torch.ones(1, LENGTH, dtype=torch.bool)
    for entries in ENTRIES:
        sizes = sizes_of(entries)

        def once(ask: Callable[[Tensor], Tensor]) -> None:
            for _ in range(QUESTIONS):
                ask(asked)

        calls = {
            OURS: lambda: once(near_far_context(k, v, **sizes)),  # noqa: B023 (called within the turn)
            EACH: lambda: once(lambda x: near_far_attention(x, k, v, key_keep=keep, **sizes)),  # noqa: B023
            EXACT: lambda: once(lambda x: softmax_attention(x, k, v)),
        }
        with torch.no_grad():
            times = in_turns(
                {name: partial(seconds, call, torch.device("cpu")) for name, call in calls.items()}, rounds
            )
        facts = {"b": 1, "h": k.shape[1], "queries": ASKED, "threads": torch.get_num_threads()}
        shared: dict[str, Any] = {"n": LENGTH, "m": entries, "facts": facts, "device": cpu_name(), "seed": 0}
        for name, taken in times.items():
            yield from timed_rows(name, taken, times[EXACT], (TIME, RATIO), **shared)


def _found(rows: Sequence[Row], quantity: str) -> dict[str, dict[int, Row]]:
    found: dict[str, dict[int, Row]] = {}
    for row in rows:
        if row.quantity == quantity and row.m is not None:
            found.setdefault(row.method, {})[row.m] = row
    return found


def _tables(rows: Sequence[Row]) -> Sequence[Table]:
    counts = sorted({row.m for row in rows if row.m is not None})
    heads = ["", *(f"{count} entries" for count in counts)]

    def table(title: str, quantity: str, digits: str) -> Table:
        found = _found(rows, quantity)
        lines = [
            [name, *(format(of[m].value, digits) if m in of else "" for m in counts)] for name, of in found.items()
        ]
        return Table(title, heads, lines)

    return [
        table("relative error of the output", ERROR, ".3f"),
        table(f"ms of {QUESTIONS} questions of {ASKED} queries", TIME, ",.4g"),
    ]


def _verdicts(rows: Sequence[Row]) -> Sequence[Verdict]:
    def decided(
        claim: str, quantity: str, beside: str, share: float, digits: str, known: Callable[[Row], Known]
    ) -> Verdict:
        found = _found(rows, quantity)
        ours, theirs = found.get(OURS, {}), found.get(beside, {})
        # Subsampled keys have no error where all keys are kept.
        both = sorted(m for m in ours.keys() & theirs.keys() if theirs[m].value > 0)
        said = "; ".join(f"{m} entries: {ours[m].value:{digits}} against {theirs[m].value:{digits}}" for m in both)
        ratios = (known(ours[m]).over(known(theirs[m])) for m in both)
        return Verdict(claim, most(ratio.within(most=share) for ratio in ratios), f"{said or 'not measured'}.")

    less = "A context has less than half the error of as many keys, evenly spread."
    quick = "100 questions to a context take less than a tenth of the time of 100 calls."
    return [
        decided(less, ERROR, SPREAD, 0.5, ".3f", mean_of),
        decided(quick, TIME, EACH, 0.1, ",.4g", quartiles_of),
    ]


def _figures(rows: Sequence[Row], folder: Path) -> "Mapping[str, Figure]":
    panels = {
        ERROR: [row for row in rows if row.quantity == ERROR],
        TIME: [row for row in rows if row.quantity == TIME],
    }
    return {"": draw_lines(panels, over=lambda row: row.m, x_label="entries", y_label="", band="", share_y=False)}


STUDIES = {
    "near-far-context": Study(
        shows="a context that is compressed once and asked many times: error over the entries kept, and time",
        source="this library",
        needs="an encoder: nystrom[real] or --model",
        minutes=1,
        plan=_plan,
        tables=_tables,
        verdicts=_verdicts,
        figures=_figures,
    )
}
