r"""A context that is compressed once (`near_far_context`): error over the entries kept, and time of 100 questions.

Queries, keys and values are those of an encoder on windows of running text, used as cross-attention: no token is near.
r entries of n keys are kept in one of three ways:

- "near_far": a sixth of the entries are heavy keys, the others are clusters;
- "near_far, asked": the same, but a sample of 64 queries decides which keys are heavy;
- "subsampled": r evenly spread keys, with exact attention to them.

A row has the relative error of the output: its mean over layers, heads and texts, and the quartiles. Times are those of
one layer for 100 questions of 16 queries each, answered by a context that is made first, by calls of
`near_far_attention` with the same sizes, and by exact attention over all keys.
"""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nystrom.attention.caches.near_far_context import near_far_context
from nystrom.attention.methods.near_far import near_far_attention
from nystrom.attention.methods.softmax import softmax_attention
from nystrom_lab.measure.rows import Row
from nystrom_papers.studies.fidelity.beside_exact import ERROR, relative_error, time_calls
from nystrom_papers.studies.reproduce.declared import Cells, Claim, Lines, Pivot, declare
from nystrom_papers.studies.reproduce.encoders import Encoder, Recording, find_encoder
from nystrom_papers.studies.reproduce.known import mean_of, quartiles_of
from nystrom_papers.studies.reproduce.rules import all_ratios
from nystrom_papers.studies.reproduce.spread import spread_row
from nystrom_papers.studies.reproduce.study import Part, Plan, Setting, beside_none

ENTRIES, LENGTH, SAMPLE, QUESTIONS, ASKED = (96, 192, 384, 768), 2048, 64, 100, 16
ROUNDS = {"small": 3, "paper": 5}
TIME, RATIO = "time of 100 questions", "time of 100 questions / exact"
OURS, WITH_SAMPLE, SPREAD, EACH, EXACT = "near_far", "near_far, asked", "subsampled", "near_far, each time", "softmax"


def _plan(setting: Setting) -> Plan:
    encoder, texts = find_encoder(setting), 8 if setting.size == "paper" else 2
    encoder.check_length(LENGTH, texts)
    parts = [
        Part("errors", partial(_measure_errors, encoder, texts)),
        Part("times", partial(_measure_times, encoder, ROUNDS[setting.size])),
    ]
    said = encoder.in_words(tokens=LENGTH, sequences=texts)
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
                errors.setdefault((name, entries), []).append(relative_error(out, exact))
    for (name, entries), values in errors.items():
        facts = {"layers": encoder.layers, "b": texts}
        yield spread_row(ERROR, name, torch.stack(values), n=LENGTH, m=entries, facts=facts, seed=0)


@torch.no_grad()
def _measure_times(encoder: Encoder, rounds: int, folder: Path) -> Iterable[Row]:
    layer = encoder.layers // 2
    q, k, v = encoder.lengthened(LENGTH, folder).record(LENGTH, 1, (layer,))[layer]
    queries, keep = q[:, :, :ASKED], torch.ones(1, LENGTH, dtype=torch.bool)

    def questions(make: Callable[[], Callable[[Tensor], Tensor]]) -> None:
        ask = make()
        for _ in range(QUESTIONS):
            ask(queries)

    for entries in ENTRIES:
        sizes = sizes_of(entries)
        makers = {
            OURS: partial(near_far_context, k, v, **sizes),
            EACH: lambda sizes=sizes: lambda x: near_far_attention(x, k, v, key_keep=keep, **sizes),
            EXACT: lambda: lambda x: softmax_attention(x, k, v),
        }
        calls = {name: partial(questions, make) for name, make in makers.items()}
        facts = {"b": 1, "h": k.shape[1], "queries": ASKED, "threads": torch.get_num_threads()}
        yield from time_calls(
            calls, rounds, beside=EXACT, quantities=(TIME, RATIO), n=LENGTH, m=entries, facts=facts, seed=0
        )


_SAID = "{{at}} entries: {{ours:{0}}} against {{theirs:{0}}}"
_TABLE = {
    "relative error of the output": Cells("{m} entries", ERROR, "{value:.3f}"),
    f"ms of {QUESTIONS} questions of {ASKED} queries": Cells("{m} entries", TIME, "{value:,.4g}"),
}

STUDIES = {
    "near-far-context": declare(
        shows="a context that is compressed once and asked many times: error over the entries kept, and time",
        source="this library",
        needs="an encoder: nystrom[real] or --model",
        minutes=1,
        plan=_plan,
        tables=[
            Pivot(title=title, index={"": "{method}"}, columns=[cell], missing="")
            for title, cell in _TABLE.items()
        ],
        claims=[
            Claim(
                "A context has less than half the error of as many keys, evenly spread.",
                all_ratios(ERROR, mean_of, _SAID.format(".3f"), OURS, SPREAD, limit=0.5, over="m"),
            ),
            Claim(
                "100 questions to a context take less than a tenth of the time of 100 calls.",
                all_ratios(TIME, quartiles_of, _SAID.format(",.4g"), OURS, EACH, limit=0.1, over="m"),
            ),
        ],
        figures={
            "": Lines(
                of={"quantity": (ERROR, TIME)}, over="m", panel="{quantity}", x_label="entries", y_label="", band="",
                options={"share_y": False},
            )
        },
    )
}  # fmt: skip
