"""What keys that each block of queries takes for itself cost on a GPU, beside products: `python tools/gpu_gather.py`.

Each block of B queries takes r keys of all n. The rows of each length:

- "gather": the keys and values of all blocks, copied to where products read them;
- "products": fused attention of each block with its keys, gathered before;
- "same products, shared keys": fused attention of all queries with the same r keys;
- "choice": the mean query of each block times all keys, and the r largest of each;
- near_far as it is, by Triton kernels, and exact attention, fused.

All are forward passes. The value is the median time in ms of interleaved calls, `low` and `high` are the quartiles.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from nystrom import near_far_attention
from nystrom.clock import seconds
from nystrom.turns import in_turns, quartiles
from nystrom_lab.measure.rows import Row, append_rows, cpu_name, new_row, read_rows

LENGTHS = (2048, 8192, 16384)


def calls(q: Tensor, k: Tensor, v: Tensor, *, block: int, asked: int) -> dict[str, Callable[[], object]]:
    """The calls that are timed, by name.

    Args:
        q: Queries (b, h, n, d).
        k: Keys (b, h, n, d).
        v: Values (b, h, n, d).
        block: Queries B of a block; divides n.
        asked: Keys r of a block, at most n.
    """
    b, h, n, d = q.shape
    blocks = q.reshape(b * h, n // block, block, d)

    def choose() -> Tensor:
        scores = blocks.mean(2) @ k.reshape(b * h, n, d).mT
        return scores.topk(asked, sorted=False).indices

    # Rows of the keys and values of all heads, one below the other.
    rows = (choose() + n * torch.arange(b * h, device=q.device)[:, None, None]).flatten()
    tables = [x.reshape(b * h * n, d) for x in (k, v)]

    def gather() -> list[Tensor]:
        return [x.index_select(0, rows).view(b * h, n // block, asked, d) for x in tables]

    keys, values = gather()
    k_shared, v_shared = (x[:, :, :asked].contiguous() for x in (k, v))
    return {
        "gather": gather,
        "products": lambda: F.scaled_dot_product_attention(blocks, keys, values),
        "same products, shared keys": lambda: F.scaled_dot_product_attention(q, k_shared, v_shared),
        "choice": choose,
        "near_far-triton": lambda: near_far_attention(q, k, v, exact_up_to=0, backend="triton"),
        "softmax": lambda: F.scaled_dot_product_attention(q, k, v),
    }


def gather_rows(
    n: int,
    *,
    device: str,
    batch: int = 8,
    heads: int = 8,
    width: int = 64,
    block: int = 16,
    asked: int = 96,
    dtype: str = "bfloat16",
    repeats: int = 15,
) -> list[Row]:
    """Rows of one length.

    Args:
        n: Tokens, a multiple of the block.
        device: "cuda", or "cpu" for the interpreter.
        batch: Sequences b.
        heads: Heads h.
        width: Width d of one head.
        block: Queries B of a block.
        asked: Keys r of a block.
        dtype: Name of the dtype.
        repeats: Timed calls of each.
    """
    place = torch.device(device)
    name = torch.cuda.get_device_name() if place.type == "cuda" else cpu_name()
    generator = torch.Generator().manual_seed(0)
    shape = (batch, heads, n, width)
    q, k, v = (torch.randn(shape, generator=generator).to(place, getattr(torch, dtype)) for _ in range(3))
    with torch.no_grad():
        timed = calls(q, k, v, block=block, asked=asked)
        times = in_turns({called: partial(seconds, call, place) for called, call in timed.items()}, repeats)
    return [_row(called, taken, n, name, dtype, {"b": batch, "h": heads, "d": width, "block": block, "asked": asked})
            for called, taken in times.items()]  # fmt: skip


def _row(method: str, taken: Sequence[float], n: int, device: str, dtype: str, facts: dict[str, int]) -> Row:
    found = quartiles([1e3 * x for x in taken])
    return new_row(
        study="gpu gather", quantity="forward time", method=method, value=found.middle, unit="ms", low=found.low,
        high=found.high, repeats=len(taken), n=n, dtype=dtype, seed=0, device=device, facts=facts,
    )  # fmt: skip


def main() -> None:
    """Measure, print and write; lengths that the file has are not measured again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, required=True, help="file of the rows, .csv")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("gpu_gather.py wants a CUDA device, and torch finds none here.")
    there = {row.n for row in read_rows(asked.to)} if asked.to.exists() else set()
    for n in LENGTHS:
        if n in there:
            continue
        rows = gather_rows(n, device="cuda")
        append_rows(asked.to, rows)
        for row in rows:
            print(f"n={n:5} {row.method:27} {row.value:8.3f} ms ({row.low:.3f} to {row.high:.3f})", flush=True)


if __name__ == "__main__":
    main()
