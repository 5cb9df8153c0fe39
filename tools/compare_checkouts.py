"""Time Nyström attention, near_far and a training step in two checkouts of this library, side by side.

    python tools/compare_checkouts.py BEFORE AFTER --to runs/compare.csv --rounds 7

BEFORE and AFTER are folders of checkouts, at any commits. Both are timed by this interpreter, each round in a new
process, and the order changes from round to round. A row is the median over rounds of the time after divided by the
time before, with its quartiles: below 1 is faster. Times are of the process (CPU seconds of one thread), which a busy
machine disturbs less than the clock.

The shapes: one sequence, 8 heads of width 64, 64 landmarks, float32, with and without the skip of 33 taps, stored head
by head and token by token; near_far with 48 heavy keys and 64 clusters, and with 192 and 256, in blocks of 64 tokens
with a reach of 8, without its exact limit for few tokens; and a training step of two layers of width 64 on 32 padded
sequences of up to 512 tokens.

    --methods nystrom        times these alone: nystrom, near_far or step
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from nystrom_lab.measure.rows import append_rows, cpu_name, new_row

METHODS = ["nystrom", "near_far", "step"]
WORKER = """
import json, sys, time, torch
torch.set_num_threads(1)
from nystrom import near_far_attention, nystrom_attention
try:
    from nystrom.models import EncoderConfig, EncoderForSequenceClassification
except ImportError:
    from nystrom.encoder import EncoderConfig, EncoderForSequenceClassification

def best(call, repeats):
    call()
    times = []
    for _ in range(repeats):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return min(times)

found = {}
g = torch.Generator().manual_seed(0)
for n, repeats in ((512, 15), (2048, 7), (8192, 5)):
    for layout in ("heads", "tokens"):
        shape = (1, 8, n, 64) if layout == "heads" else (1, n, 8, 64)
        q, k, v, grad = (torch.randn(shape, generator=g) for _ in range(4))
        if layout == "tokens":
            q, k, v, grad = (x.transpose(1, 2) for x in (q, k, v, grad))
        taps = torch.randn(8, 1, 33, 1, generator=g)
        leaves = [x.requires_grad_() for x in (q, k, v, taps)]
        calls = {}
        if "nystrom" in sys.argv:
            calls["nystrom-64"] = lambda: nystrom_attention(q, k, v, num_landmarks=64)
            calls["nystrom-64+skip"] = lambda: nystrom_attention(q, k, v, num_landmarks=64, skip=taps)
        if "near_far" in sys.argv:
            for heavy, clusters in ((48, 64), (192, 256)):
                sizes = {"num_heavy": heavy, "num_clusters": clusters, "exact_up_to": 0}
                calls[f"near_far-{heavy}+{clusters}"] = lambda sizes=sizes: near_far_attention(q, k, v, **sizes)
        for name, call in calls.items():
            def forward():
                with torch.no_grad():
                    call()
            def both():
                for x in leaves:
                    x.grad = None
                call().backward(grad)
            found[f"{n}|{name}|{layout}|forward"] = best(forward, repeats)
            found[f"{n}|{name}|{layout}|forward+backward"] = best(both, repeats)
if "step" not in sys.argv:
    print(json.dumps(found))
    sys.exit()
torch.manual_seed(0)
config = EncoderConfig(vocab_size=17, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128,
                       max_position_embeddings=512, attention="nystrom", attention_options={"num_landmarks": 32},
                       conv_kernel_size=33, norm="pre", num_labels=10)
model = EncoderForSequenceClassification(config).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
ids, labels = torch.randint(1, 17, (32, 512)), torch.randint(10, (32,))
mask = torch.arange(512) < torch.randint(128, 513, (32, 1))
def step():
    optimizer.zero_grad()
    model(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
    optimizer.step()
found["512|nystrom-32+skip|tokens|training step"] = best(step, 5)
print(json.dumps(found))
"""


def timed(checkout: Path, methods: list[str]) -> dict[str, float]:
    """The times of one checkout, in seconds."""
    # Older checkouts have their sources in one folder.
    sources = os.pathsep.join(map(str, (checkout / "src", *checkout.glob("packages/*/src"))))
    environment = {**os.environ, "PYTHONPATH": sources, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WORKER, *methods],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{checkout}: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def commit(checkout: Path) -> str:
    """The commit of a checkout, shortened."""
    words = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    """Compare, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    asked = parser.parse_args()
    if asked.to.exists():
        parser.error(f"{asked.to} exists: name another file in --to.")
    trees, seen = (asked.before, asked.after), ({}, {})
    for i in range(asked.rounds):
        for tree in (0, 1) if i % 2 == 0 else (1, 0):
            for key, seconds in timed(trees[tree], asked.methods).items():
                seen[tree].setdefault(key, []).append(seconds)
        print(f"round {i + 1} of {asked.rounds}", file=sys.stderr)
    command = f"python tools/compare_checkouts.py BEFORE AFTER --rounds {asked.rounds}"
    if asked.methods != METHODS:
        command += f" --methods {' '.join(asked.methods)}"
    rows = []
    for key, after in seen[1].items():
        n, method, layout, what = key.split("|")
        ratios = [late / early for late, early in zip(after, seen[0][key], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        step = what == "training step"
        rows.append(
            new_row(
                study="compare",
                quantity=f"{what} time, {commit(asked.after)} / {commit(asked.before)}",
                method=method,
                value=middle,
                low=low,
                high=high,
                unit="",
                repeats=asked.rounds,
                n=int(n),
                m=None if method.startswith("near_far") else 32 if step else 64,
                facts={"b": 32, "h": 2, "d": 32, "layers": 2, "kernel": 33, "threads": 1}
                if step
                else {
                    "b": 1,
                    "h": 8,
                    "d": 64,
                    "kernel": 33 if "skip" in method else None,
                    "layout": layout,
                    "threads": 1,
                },
                device=cpu_name(),
                seed=0,
                command=command,
            )
        )
        print(f"n={n:5} {method:16} {layout:7} {what:17} {middle:.2f} ({low:.2f} to {high:.2f})")
    append_rows(asked.to, rows)


if __name__ == "__main__":
    main()
