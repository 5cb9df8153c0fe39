r"""A small in-context model of tables, trained on drawn tasks, and what a compressed context does to its predictions.

Rows of a table attend to the training rows only, layer by layer, as in TabPFN v3 and the last stage of TabICL: a test
row is classified by the labelled rows, without any training on the table. The weights of TabPFN cannot be had without
an account, so that this model stands in for them.

    python tools/table_model.py train --steps 3000 --to tables.safetensors
    python tools/table_model.py ask --model tables.safetensors --rows 1024 4096 16384 65536 --to rows.csv
    python tools/table_model.py sharp --model tables.safetensors --rows 8192 --to rows.csv
    python tools/table_model.py time --rows 16384 100000 --turns 5 --to rows.csv

`ask` compares, on the same drawn tasks, exact attention with contexts of --entries entries (`near_far_context`) and
with as many drawn training rows: area under the curve, log loss, and the mean change of the probability. `sharp`
multiplies the scores of the model's heads, as TabPFN v3.5 has them large, and tells the error of contexts. `time` asks
the attention of TabPFN v3.5 (16 heads of 64, which share one of keys) for 1,000 test rows and cached training rows,
float32 and int8, alone and with `nystrom.integrations.tabpfn`, in turns, with the bytes of the cache and the context.
"""

import argparse
import math
import time
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from sklearn.metrics import log_loss, roc_auc_score
from torch import nn

from nystrom import near_far_context
from nystrom.interleaved_timing import quartiles, ratios
from nystrom.whole_files import check_new
from nystrom_lab.measure.rows import Row, append_rows, cpu_name

WIDTH, HEADS, LAYERS, FEATURES = 48, 4, 3, 6
TEST_ROWS = 1000
# Factors of the scores.
SHARPER = (1, 5, 30)
# Training rows of a task, as powers of two, and test rows beside them.
FEWEST, MOST, BESIDE = 6, 9, 96


class Block(nn.Module):
    """A layer: all rows attend to the first n, by scores whose scale grows with the logarithm of n."""

    def __init__(self):
        super().__init__()
        self.norm, self.feed_forward_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key_value, self.out = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        self.feed_forward = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.sharpness = nn.Parameter(torch.zeros(HEADS))

    def forward(self, x, n, attend):
        """Rows (b, rows, width) of which the first n are attended to, by `attend(q, k, v)`."""
        y = self.norm(x)
        k, v = (heads_of(part) for part in self.key_value(y[:, :n]).chunk(2, dim=-1))
        q = heads_of(self.query(y)) * (1 + self.sharpness * math.log(n / 256))[:, None, None]
        x = x + self.out(attend(q, k, v).transpose(1, 2).flatten(2))
        return x + self.feed_forward(self.feed_forward_norm(x))


class TableModel(nn.Module):
    """Logits of a binary class for the rows after the first n, whose labels it sees."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(FEATURES, 128), nn.GELU(), nn.Linear(128, WIDTH))
        self.labels = nn.Embedding(3, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1))

    def forward(self, x, labels, n, attend=F.scaled_dot_product_attention):
        """Logits (b, rows - n) of rows (b, rows, features) with labels (b, rows)."""
        seen = torch.cat([labels[:, :n].long(), torch.full_like(labels[:, n:], 2).long()], dim=1)
        hidden = self.features(x) + self.labels(seen)
        for block in self.blocks:
            hidden = block(hidden, n, attend)
        return self.head(hidden[:, n:])[..., 0]


def heads_of(x):
    """Rows (b, rows, width) as heads (b, heads, rows, width of a head)."""
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def draw_tasks(count, rows, rng):
    """Tables (count, rows, features) and labels: networks, trees and balls of drawn features, with noise."""
    x, y = np.zeros((count, rows, FEATURES), np.float32), np.zeros((count, rows), np.float32)
    for table, labels in zip(x, y, strict=True):
        d = rng.integers(2, FEATURES + 1)
        z = rng.normal(size=(rows, d)) if rng.random() < 0.6 else rng.uniform(-1.7, 1.7, size=(rows, d))
        if rng.random() < 0.7:
            z = z @ rng.normal(size=(d, d)) / math.sqrt(d)
        score = draw_score(z, rng)
        score += rng.normal(size=rows) * score.std() * rng.uniform(0, 0.3)
        table[:, :d] = (z - z.mean(0)) / (z.std(0) + 1e-6)
        labels[:] = score > np.median(score)
    return torch.from_numpy(x), torch.from_numpy(y)


def draw_score(z, rng):
    """A drawn function of the features (rows, d): a network, products of splits, or balls."""
    rows, d = z.shape
    kind = rng.random()
    if kind < 0.5:
        width = rng.integers(4, 33)
        hidden = np.tanh(z @ rng.normal(size=(d, width)) * rng.uniform(0.5, 3) + rng.normal(size=width))
        return hidden @ rng.normal(size=width)
    score = np.zeros(rows)
    if kind < 0.8:
        for _ in range(rng.integers(1, 9)):
            splits = [np.sign(z[:, rng.integers(d)] - rng.normal() * 0.7) for _ in range(rng.integers(1, 4))]
            score += rng.normal() * np.prod(splits, axis=0)
        return score
    for _ in range(rng.integers(2, 12)):
        distance = ((z - z[rng.integers(rows)]) ** 2).sum(1)
        score -= np.exp(-distance / rng.uniform(0.5, 3)) * rng.choice([-1, 1])
    return score


def train(args):
    """Train from scratch, and write the weights."""
    check_new(args.to)
    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    model = TableModel()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=1e-2, betas=(0.9, 0.98))
    losses, begun = [], time.process_time()
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1, (step + 1) / 50) * (0.5 + 0.5 * math.cos(math.pi * step / args.steps))
        n = int(2 ** rng.uniform(FEWEST, MOST))
        x, y = draw_tasks(max(3, 3072 // (n + BESIDE)), n + BESIDE, rng)
        loss = F.binary_cross_entropy_with_logits(model(x, y, n), y[:, n:])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if (step + 1) % 100 == 0:
            minutes = (time.process_time() - begun) / 60
            print(f"step {step + 1} loss {np.mean(losses[-100:]):.3f} {minutes:.1f} processor minutes", flush=True)
    save_file(model.state_dict(), args.to)


def attend_by_context(q, k, v, *, entries):
    """Attention to a context that is compressed anew."""
    heavy = entries // 6
    return near_far_context(k, v, num_heavy=heavy, num_clusters=entries - heavy)(q)


def ways_of(model, x, y, n, entries, rng):
    """Each way's logits of the test rows, computed when they are called."""
    drawn = torch.from_numpy(rng.permutation(n)[:entries])
    few = [torch.cat([part[:, drawn], part[:, n:]], dim=1) for part in (x, y)]
    return {
        "exact": partial(model, x, y, n),
        f"context-{entries}": partial(model, x, y, n, partial(attend_by_context, entries=entries)),
        f"rows-{entries}": partial(model, *few, min(n, entries)),
    }


@torch.inference_mode()
def ask(args):
    """Compare the ways on drawn tasks, and append rows."""
    model = TableModel().eval()
    model.load_state_dict(load_file(args.model))
    for n in args.rows:
        rng = np.random.default_rng(args.seed)
        results = defaultdict(list)
        for _ in range(args.tasks):
            x, y = draw_tasks(1, n + TEST_ROWS, rng)
            truth, exact = y[0, n:].numpy(), None
            for way, logits in ways_of(model, x, y, n, args.entries, rng).items():
                begun = time.perf_counter()
                p = torch.sigmoid(logits())[0].double().numpy()
                results[way, "seconds"].append(time.perf_counter() - begun)
                exact = p if exact is None else exact
                results[way, "AUC"].append(roc_auc_score(truth, p))
                results[way, "log loss"].append(log_loss(truth, p, labels=[0, 1]))
                results[way, "mean change of p"].append(np.abs(p - exact).mean())
        rows = [
            Row(study="tables", quantity=what, method=way, value=float(np.mean(values)), low=float(min(values)),
                high=float(max(values)), repeats=args.tasks, n=n, m=args.entries, dtype="float32", seed=args.seed,
                device=cpu_name(), unit="s" if what == "seconds" else "")
            for (way, what), values in results.items()
        ]  # fmt: skip
        for row in rows:
            print(f"{row.n:6} {row.method:12} {row.quantity:16} {row.value:.4f}", flush=True)
        append_rows(args.to, rows)


@torch.inference_mode()
def sharpen(args):
    """The error of contexts where the model's scores are multiplied, by entries; append rows."""
    model = TableModel().eval()
    model.load_state_dict(load_file(args.model))
    for n in args.rows:
        x, y = draw_tasks(1, n + TEST_ROWS, np.random.default_rng(args.seed))
        calls = []

        def attend(q, k, v, calls=calls):
            calls.append((q[:, :, -TEST_ROWS:], k, v))
            return F.scaled_dot_product_attention(q, k, v)

        model(x, y, n, attend)
        for factor in SHARPER:
            for entries in (args.entries, 4 * args.entries):
                errors = []
                for q, k, v in calls:
                    exact = F.scaled_dot_product_attention(factor * q, k, v)
                    missed = attend_by_context(factor * q, k, v, entries=entries) - exact
                    errors += (missed.norm(dim=(2, 3)) / exact.norm(dim=(2, 3))).flatten().tolist()
                row = Row(study="tables", quantity="error of a head's attention", method=f"context-{entries}",
                          n=n, m=entries, value=float(np.median(errors)), low=min(errors), high=max(errors),
                          repeats=len(errors),
                          dtype="float32", seed=args.seed, device=cpu_name(), facts={"factor": factor})  # fmt: skip
                print(
                    f"{n:6} scores times {factor:2} {row.method:13} {row.value:.3f} ({row.low:.3f} to {row.high:.3f})"
                )
                append_rows(args.to, [row])


@torch.inference_mode()
def measure_times(args):
    """Times of a layer of TabPFN v3.5 with cached rows, and bytes; append rows."""
    from tabpfn.architectures.kv_cache import KVCacheEntry
    from tabpfn.architectures.shared.attention_backends import registered_attention_backends
    from tabpfn.architectures.shared.scaled_dot_product_attention import scaled_dot_product_attention

    from nystrom.integrations.tabpfn import register, unregister

    torch.manual_seed(args.seed)
    for n in args.rows:
        q = torch.randn(1, TEST_ROWS, 16, 64)
        k, v = torch.randn(2, 1, n, 1, 64)
        entry = KVCacheEntry(k, v)
        calls = {
            "float32": partial(scaled_dot_product_attention, q, entry.key, entry.value),
            "int8": partial(scaled_dot_product_attention, q, None, None, quantized_kv=entry.quantize()),
        }
        for dtype, call in calls.items():
            stored = call.keywords.get("quantized_kv", entry)
            cached = stored.key.nbytes + stored.value.nbytes
            register(num_entries=args.entries)
            ours: Any = next(each for each in registered_attention_backends() if each.name == "nystrom")
            begun = time.perf_counter()
            call()
            first = time.perf_counter() - begun
            taken = {"exact": [], "context": []}
            for _ in range(args.turns):
                for way, backend in (("exact", None), ("context", ours)):
                    begun = time.perf_counter()
                    call(backend=backend)
                    taken[way].append(time.perf_counter() - begun)
            unregister()
            low, middle, high = ratios(taken["exact"], taken["context"])
            kept = ours.contexts.bytes_kept()
            row = partial(Row, study="tables", method=f"context-{args.entries}", n=n, m=args.entries, dtype=dtype,
                          seed=args.seed, device=cpu_name(), repeats=args.turns)  # fmt: skip
            rows = [
                row(quantity="time of exact attention / context", value=middle, low=low, high=high),
                row(quantity="first call, with compression", value=first, unit="s", repeats=1),
                row(quantity="bytes of the cache / of the context", value=cached / kept, repeats=1),
            ]
            for way, seconds in taken.items():
                low, middle, high = quartiles(seconds)
                rows.append(row(quantity=f"time, {way}", value=middle, low=low, high=high, unit="s"))
            for each in rows:
                print(f"{each.n:6} {each.dtype:8} {each.quantity:36} {each.value:.4g}", flush=True)
            append_rows(args.to, rows)


def main():
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["train", "ask", "sharp", "time"])
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--rows", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--entries", type=int, default=768)
    parser.add_argument("--tasks", type=int, default=8)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--to", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    {"train": train, "ask": ask, "sharp": sharpen, "time": measure_times}[args.what](args)


if __name__ == "__main__":
    main()
