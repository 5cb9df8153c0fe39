"""Time Nyström attention and a training step in two checkouts of this library, side by side.

    python tools/compare_checkouts.py BEFORE AFTER --to runs/compare.csv --rounds 7

BEFORE and AFTER are folders of checkouts, at any commits. Both are timed by this interpreter, each round in a new
process, and the order changes from round to round. A row is the median over rounds of the time after divided by the
time before, with its quartiles: below 1 is faster. Times are of the process (CPU seconds of one thread), which a busy
machine disturbs less than the clock.

The shapes: one sequence, 8 heads of width 64, 64 landmarks, float32, with and without the skip of 33 taps, stored head
by head and token by token; and a training step of two layers of width 64 on 32 padded sequences of up to 512 tokens.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from nystrom_lab.measure.rows import append_rows, cpu_name, new_row

WORKER = """
import json, time, torch
torch.set_num_threads(1)
from nystrom import nystrom_attention
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
        for name, skip in (("nystrom-64", None), ("nystrom-64+skip", taps)):
            def forward():
                with torch.no_grad():
                    nystrom_attention(q, k, v, num_landmarks=64, skip=skip)
            def both():
                for x in leaves:
                    x.grad = None
                nystrom_attention(q, k, v, num_landmarks=64, skip=skip).backward(grad)
            found[f"{n}|{name}|{layout}|forward"] = best(forward, repeats)
            found[f"{n}|{name}|{layout}|forward+backward"] = best(both, repeats)
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


def timed(checkout: Path) -> dict[str, float]:
    """The times of one checkout, in seconds."""
    environment = {**os.environ, "PYTHONPATH": str(checkout / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WORKER], env=environment, capture_output=True, text=True, check=False
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
    asked = parser.parse_args()
    if asked.to.exists():
        parser.error(f"{asked.to} exists: name another file in --to.")
    trees, seen = (asked.before, asked.after), ({}, {})
    for i in range(asked.rounds):
        for tree in (0, 1) if i % 2 == 0 else (1, 0):
            for key, seconds in timed(trees[tree]).items():
                seen[tree].setdefault(key, []).append(seconds)
        print(f"round {i + 1} of {asked.rounds}", file=sys.stderr)
    command = f"python tools/compare_checkouts.py BEFORE AFTER --rounds {asked.rounds}"
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
                m=32 if step else 64,
                facts={"b": 32, "h": 2, "d": 32, "layers": 2, "kernel": 33, "threads": 1}
                if step
                else {"b": 1, "h": 8, "d": 64, "kernel": 33, "layout": layout, "threads": 1},
                device=cpu_name(),
                seed=0,
                command=command,
            )
        )
        print(f"n={n:5} {method:16} {layout:7} {what:17} {middle:.2f} ({low:.2f} to {high:.2f})")
    append_rows(asked.to, rows)


if __name__ == "__main__":
    main()
