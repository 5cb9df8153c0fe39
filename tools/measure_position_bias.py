"""The cost of a bias of positions for near_far, in time and memory, with random queries, keys and values.

- `ratio`: near_far with T5's buckets beside near_far without a bias, 12 heads of 64, forward and with its gradients.
- `protein`: the peak memory of near_far with T5's buckets beyond its inputs, a layer of ProtT5's shape, 32 heads of 128
  over 35,213 residues.
- `slide`: that of near_far with ALiBi in two dimensions, a layer of TITAN's shape, 12 heads of 64 over 20,000 tiles in
  the order of a Hilbert curve; and its time beside exact attention with the same bias, a stretch of queries at a time.

Times are wall-clock, in turns; memory is what torch's allocator gave at most beyond what was there.

    python tools/measure_position_bias.py --to results/position-bias.csv
"""

import argparse
import time
from functools import partial
from pathlib import Path

import torch

from nystrom import Alibi2d, RelativeBuckets, hilbert_order, near_far_attention
from nystrom.attention.methods.softmax import softmax_attention
from nystrom.interleaved_timing import in_turns, quartiles, ratios
from nystrom_lab.measure.peak import peak_bytes
from nystrom_lab.measure.rows import Row, append_rows

SEED, CPU = 0, torch.device("cpu")
# The method's own sizes, and no exact limit.
NEAR_FAR = {"exact_up_to": 0}
BUCKETS, TILES_HIGH = 32, 125


def draw(heads, n, width):
    """Queries, keys and values of one sequence."""
    generator = torch.Generator().manual_seed(SEED)
    return [torch.randn(1, heads, n, width, generator=generator) for _ in range(3)]


def buckets(heads):
    """A table of T5's shape."""
    return RelativeBuckets(torch.randn(heads, BUCKETS, generator=torch.Generator().manual_seed(SEED + 1)))


def tiles(n, heads):
    """ALiBi over a slide that is full of tiles."""
    places = torch.cartesian_prod(torch.arange(-(-n // TILES_HIGH)), torch.arange(TILES_HIGH))[:n]
    return Alibi2d(2.0 ** -torch.linspace(1, 8, heads), places[hilbert_order(places)])


def forward(attend, inputs):
    """The seconds of a call without gradients."""
    start = time.perf_counter()
    with torch.no_grad():
        attend(*inputs)
    return time.perf_counter() - start


def training(attend, inputs):
    """The seconds of a call and its gradients."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    start = time.perf_counter()
    attend(*inputs).sum().backward()
    return time.perf_counter() - start


def peak(attend, inputs):
    """The peak memory of a call without gradients, in MB."""
    with torch.no_grad():
        return peak_bytes(partial(attend, *inputs), CPU) / 1e6


def row(quantity, method, value, inputs, *, threads, **others):
    """One row, with the shape of the inputs."""
    _, heads, n, width = inputs[0].shape
    facts = {"b": 1, "h": heads, "d": width, "threads": threads}
    named = {"quantity": quantity, "method": method, "value": value, "n": n, "m": 64, "seed": SEED, "facts": facts}
    return Row(study="position-bias", **named, **others)


def times(ways, inputs, clock, what, args, turns):
    """Rows of the times of two ways, and of the first over the second."""
    taken = in_turns({name: partial(clock, attend, inputs) for name, attend in ways.items()}, turns)
    (first, second), told = ways, {"threads": args.threads, "repeats": turns}
    for name, seconds in taken.items():
        low, middle, high = quartiles(seconds)
        yield row(f"{what} time", name, middle, inputs, low=low, high=high, unit="s", **told)
    low, middle, high = ratios(taken[first], taken[second])
    yield row(f"{what} time / {second}", first, middle, inputs, low=low, high=high, **told)


def ratio(args):
    """Times with and without T5's buckets."""
    for n in args.lengths:
        inputs, plain = draw(12, n, 64), partial(near_far_attention, **NEAR_FAR)
        ways = {"near_far, buckets": partial(plain, bias=buckets(12)), "near_far": plain}
        for clock in (forward, training):
            yield from times(ways, inputs, clock, clock.__name__, args, args.turns)


def protein(args):
    """Memory of a layer of ProtT5's shape."""
    inputs = draw(32, args.residues, 128)
    found = peak(partial(near_far_attention, bias=buckets(32), **NEAR_FAR), inputs)
    yield row("forward peak memory", "near_far, buckets", found, inputs, unit="MB", threads=1)


def slide(args):
    """Memory and time of a layer of TITAN's shape."""
    inputs, bias = draw(12, args.tiles, 64), tiles(args.tiles, 12)
    ours = partial(near_far_attention, bias=bias, **NEAR_FAR)
    found = peak(ours, inputs)
    yield row("forward peak memory", "near_far, ALiBi in 2-D", found, inputs, unit="MB", threads=1)
    ways = {"near_far, ALiBi in 2-D": ours, "exact, ALiBi in 2-D": partial(softmax_attention, bias=bias)}
    yield from times(ways, inputs, forward, "forward", args, args.slow_turns)


def main():
    """Measure, and append rows after each kind."""
    kinds = {each.__name__: each for each in (ratio, protein, slide)}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=kinds, default=list(kinds))
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--residues", type=int, default=35_213)
    parser.add_argument("--tiles", type=int, default=20_000)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--slow-turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--to", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for kind in args.only:
        rows = list(kinds[kind](args))
        for each in rows:
            print(each.n, each.method, each.quantity, f"{each.value:.4g}", each.unit, flush=True)
        append_rows(args.to, rows)


if __name__ == "__main__":
    main()
