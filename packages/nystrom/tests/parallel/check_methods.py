"""Outputs, gradients and bytes of every method over ranks, beside those of one process; run by `ranks.py`."""

import functools
import gc

import torch
import torch.distributed as dist

from nystrom import build_attention
from nystrom.attention.functions import FUNCTIONS
from nystrom.attention.registry import METHODS
from nystrom.parallel import count_bytes
from nystrom.parallel.communication import Ranks
from nystrom.parallel.entry_over_ranks import OVER_RANKS
from nystrom.parallel.methods.near_far_over_ranks import hops

VARIANTS = {
    "nystrom": [
        {"num_landmarks": 5},
        # Segments of one length, of 18 keys.
        {"num_landmarks": 6},
        {"num_landmarks": 5, "landmarks": "uniform"},
        {"num_landmarks": 5, "landmarks": "kmeans"},
        # More landmarks than one of two sequences has keys.
        {"num_landmarks": 16, "landmarks": "uniform", "pinv": "ridge"},
        {"num_landmarks": 40},
    ],
    "near_far": [
        {"block_size": 4, "reach": 1, "num_heavy": 2, "num_clusters": 3, "exact_up_to": 0},
        {"block_size": 2, "reach": 5, "num_heavy": 0, "num_clusters": 2, "exact_up_to": 0, "iterations": 2},
        {"block_size": 30, "reach": 0, "num_heavy": 3, "num_clusters": 1, "exact_up_to": 0},
        # One of the masked sequences is shorter, and then all are.
        {"block_size": 4, "reach": 1, "num_heavy": 2, "num_clusters": 3, "exact_up_to": 16},
        {"exact_up_to": 40},
    ],
    "skyformer": [{"num_landmarks": 6}, {"num_landmarks": 16, "kernel": "laplace"}],
    "softmax": [{}],
    "longformer": [{"window": 5}, {"window": 3, "num_global": 2}, {"window": 99, "num_global": 1}],
}
# Tokens of each rank: uneven, none on one rank, and fewer than a window reaches over.
PIECES = {2: [(7, 16), (0, 23), (21, 2)], 4: [(7, 0, 9, 7), (1, 1, 20, 1), (0, 0, 23, 0)]}
OTHER_PIECES = {2: [(9, 9), (18, 0), (1, 17)], 4: [(5, 3, 9, 1), (0, 9, 0, 9), (18, 0, 0, 0)]}
# float64 rounding through an inverse whose condition is a few thousand, over sums in another order.
CLOSE = {"rtol": 1e-8, "atol": 1e-9}


def checks():
    assert set(VARIANTS) == set(OVER_RANKS) == {name for name, method in METHODS.items() if method.over_ranks}
    for name, variants in VARIANTS.items():
        for options in variants:
            kinds = ["self", "cross"] if METHODS[name].cross_attention else ["self"]
            for case, kind in enumerate([*kinds, *(f"masked {kind}" for kind in kinds)]):
                check = functools.partial(one_process_gives_the_same, name, options, case % 3, kind)
                yield f"{name} {options} {kind}", check
        yield f"{name} repeats", functools.partial(one_process_gives_the_same, name, variants[0], 0, "repeated self")
        if not METHODS[name].positional:
            yield f"{name} holes", functools.partial(one_process_gives_the_same, name, variants[0], 2, "masked self")
    for name in ("nystrom", "softmax"):
        yield f"{name} with a skip", functools.partial(the_skip_is_that_of_one_process, name)
    for name in ("nystrom", "near_far"):
        yield f"{name} with an exact head", functools.partial(the_skip_is_that_of_one_process, name, exact_heads=[1])
    for name in ("nystrom", "skyformer"):
        yield f"draws of {name}", functools.partial(draws_are_those_of_the_first_rank, name)
    for name in VARIANTS:
        yield f"bytes of {name}", functools.partial(bytes_grow_with_the_tokens_for_exact_attention_alone, name)
        if name != "longformer":
            yield f"documented bytes of {name}", functools.partial(bytes_are_those_of_the_page, name)
    yield "low precision", results_have_the_dtype_of_the_values
    yield "nothing", nothing_gives_nothing
    yield "a part of the ranks", a_group_of_some_ranks_sees_their_tokens_alone
    # The last, so that it sees what any of the others left.
    yield "what stays", nothing_of_a_call_stays


def one_process_gives_the_same(name, options, case, kind):
    size, function = dist.get_world_size(), FUNCTIONS[name]
    cross = "cross" in kind
    n = PIECES[size][case]
    s = OTHER_PIECES[size][case] if cross else n
    q, k, v, grad = inputs(sum(n), sum(s), case)
    if "repeated" in kind:
        # Five words without positions: their weights differ by rounding alone, and not as on one process.
        q, k = (x[:, :, torch.arange(sum(n)) * 7 % 5] for x in (q, k))
    named = masks(sum(n), sum(s), case, cross, "masked" in kind)
    expected, theirs = forward_and_backward(function, (q, k, v), grad, **named, **options)
    cut = [mine(x, lengths, 2) for x, lengths in ((q, n), (k, s), (v, s))]
    out, ours = forward_and_backward(
        function,
        cut,
        mine(grad, n, 2),
        **{side: mine(mask, s if side == "key_keep" else n, 1) for side, mask in named.items()},
        group=dist.group.WORLD,
        **options,
    )
    torch.testing.assert_close(out, mine(expected, n, 2), **CLOSE)
    for x, y, lengths in zip(ours, theirs, (n, s, s), strict=True):
        torch.testing.assert_close(x, mine(y, lengths, 2), **CLOSE)


def the_skip_is_that_of_one_process(name, **more):
    """Also by the Module, whose draws and weights are its own."""
    n = PIECES[dist.get_world_size()][0]
    q, k, v, grad = inputs(sum(n), sum(n), 0)
    keep = masks(sum(n), sum(n), 0, cross=False)["keep"]
    skip = torch.randn(2, 1, 19, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    heads = build_attention(name, num_heads=2, head_dim=4, **VARIANTS[name][0], **more)

    def attend(q, k, v, skip, *, keep):
        return heads(q, k, v, keep=keep, skip=skip)

    expected, theirs = forward_and_backward(attend, (q, k, v, skip), grad, keep=keep)
    heads.group = dist.group.WORLD
    cut = [mine(x, n, 2) for x in (q, k, v)]
    out, ours = forward_and_backward(attend, (*cut, skip), mine(grad, n, 2), keep=mine(keep, n, 1))
    torch.testing.assert_close(out, mine(expected, n, 2), **CLOSE)
    for x, y in zip(ours[:3], theirs[:3], strict=True):
        torch.testing.assert_close(x, mine(y, n, 2), **CLOSE)
    dist.all_reduce(ours[3])
    torch.testing.assert_close(ours[3], theirs[3], **CLOSE)


def draws_are_those_of_the_first_rank(name):
    n = PIECES[dist.get_world_size()][0]
    q, k, v, _ = inputs(sum(n), sum(n), 0)
    options = {**VARIANTS[name][0], **({"landmarks": "uniform"} if name == "nystrom" else {})}
    expected = FUNCTIONS[name](q, k, v, generator=torch.Generator().manual_seed(7), **options)
    own = torch.Generator().manual_seed(7 + dist.get_rank())
    cut = [mine(x, n, 2) for x in (q, k, v)]
    out = FUNCTIONS[name](*cut, generator=own, group=dist.group.WORLD, **options)
    torch.testing.assert_close(out, mine(expected, n, 2), **CLOSE)
    assert not torch.equal(expected, FUNCTIONS[name](q, k, v, **options))


def bytes_are_those_of_the_page(name):
    """The bytes of the table in docs/many-machines-measured.md, in float32, with 32 for each other rank to agree."""
    (size, rank), length, d, options = (dist.get_world_size(), dist.get_rank()), 60, 4, VARIANTS[name][0]
    q, k, v, _ = (mine(x.float(), [length // size] * size, 2) for x in inputs(length, length, 0))
    with count_bytes() as forward:
        FUNCTIONS[name](q, k, v, group=dist.group.WORLD, **options)
    if name == "near_far":
        m, g, others = options["num_clusters"], options["num_heavy"], range(size)
        iterations, around = METHODS[name].options().iterations, options["block_size"] - 1 + options["reach"]
        sides = sum(rank + side in others for side in (-1, 1))
        scans = sum(rank + side * distance in others for side in (-1, 1) for distance in hops(size))
        numbers = 8 * (2 * d + 3) + 2 * g * (size - 1) + iterations * m * (d + 1) + (g + m) * (2 * d + 1)
        numbers += sides * around * (2 * d + 2) + scans * m * d
    elif name == "softmax":
        numbers = length // size * (2 * d + 1)
    else:
        m = options["num_landmarks"]
        numbers = 2 * m * (d + 1) + m + m * (d + 1) if name == "nystrom" else 2 * m * d
    assert forward.total == 2 * 2 * 4 * numbers + 32 * (size - 1)


def bytes_grow_with_the_tokens_for_exact_attention_alone(name):
    counted = []
    for length in (60, 240):
        size = dist.get_world_size()
        n = [length // size] * size
        q, k, v, grad = (mine(x, n, 2) for x in inputs(length, length, 0))
        with count_bytes() as forward:
            x = [y.requires_grad_() for y in (q, k, v)]
            out = FUNCTIONS[name](*x, group=dist.group.WORLD, **VARIANTS[name][0])
        with count_bytes() as backward:
            out.backward(grad)
        counted.append((forward.total, backward.total))
        assert forward.total == sum(forward.by_kind.values())
        assert forward.calls > 0
        assert backward.total > 0
    short, long = counted
    if name == "softmax":
        # All except the agreement of a few numbers.
        assert long[1] == 4 * short[1]
        assert 3.9 < long[0] / short[0] < 4
    else:
        assert short == long


def results_have_the_dtype_of_the_values():
    n = PIECES[dist.get_world_size()][0]
    q, k, v, _ = (x.float() for x in inputs(sum(n), sum(n), 0))
    cut, rank = [mine(x, n, 2) for x in (q, k, v)], dist.get_rank()
    for name in VARIANTS:
        options = VARIANTS[name][0]
        expected = mine(FUNCTIONS[name](q, k, v, **options), n, 2)
        for dtype in (torch.bfloat16, torch.float16):
            out = FUNCTIONS[name](*(x.to(dtype) for x in cut), group=dist.group.WORLD, **options)
            with torch.autocast("cpu", dtype):
                same = FUNCTIONS[name](*cut, group=dist.group.WORLD, **options)
            assert out.dtype == same.dtype == dtype
            torch.testing.assert_close(out, same, rtol=0, atol=0)
            # Eight or eleven bits through an inverse: a wrong formula is off by the size of the numbers themselves.
            # A rank may have no token.
            assert (out - expected).norm() <= 0.1 * expected.norm(), (name, dtype, rank)


def nothing_gives_nothing():
    for name in VARIANTS:
        for batch, n in ((2, 0), (0, 5)):
            x = torch.zeros(batch, 2, n, 4, dtype=torch.float64, requires_grad=True)
            out = FUNCTIONS[name](x, x, x, group=dist.group.WORLD, **VARIANTS[name][0])
            assert out.shape == x.shape
            out.sum().backward()
            assert x.grad.shape == x.shape
        # One sequence without a real token, beside another.
        n = PIECES[dist.get_world_size()][0]
        q, k, v, _ = (mine(x, n, 2) for x in inputs(sum(n), sum(n), 0))
        keep = torch.arange(2)[:, None].expand(2, q.shape[2]) == 1
        out = FUNCTIONS[name](q, k, v, keep=keep, group=dist.group.WORLD, **VARIANTS[name][0])
        assert not out[0].any()
        assert out[1].isfinite().all()


def a_group_of_some_ranks_sees_their_tokens_alone():
    # All ranks make every group.
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    q, k, v, _ = inputs(12, 12, dist.get_rank())
    own = groups[dist.get_rank()]
    for name in VARIANTS:
        function, options = FUNCTIONS[name], VARIANTS[name][0]
        out = function(q, k, v, group=own, **options)
        torch.testing.assert_close(out, function(q, k, v, **options), **CLOSE)


def nothing_of_a_call_stays():
    """A graph that held itself would keep the memory of every call, and the threads of the group."""
    gc.collect()
    assert not [each for each in gc.get_objects() if type(each) is Ranks]


def forward_and_backward(function, tensors, grad, **options):
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out = function(*leaves, **options)
    return out.detach(), torch.autograd.grad(out, leaves, grad)


def inputs(n, s, seed):
    """Queries, keys, values and the gradient of the outputs, the same on all ranks."""
    source = torch.Generator().manual_seed(seed)
    shapes = (n, 4), (s, 4), (s, 4), (n, 4)
    return [torch.randn(2, 2, *shape, dtype=torch.float64, generator=source) for shape in shapes]


def masks(n, s, seed, cross, masked=True):
    """Padding at either end, holes, and in the second case a sequence with few real tokens, by name."""
    if not masked:
        # A rule about positions asks for a word where keys are other tokens than queries.
        return {"key_keep": torch.ones(2, s, dtype=torch.bool)} if cross else {}
    source = torch.Generator().manual_seed(seed)
    keep, query_keep = (torch.rand(2, length, generator=source) < 0.8 for length in (s, n))
    keep[0, :4] = keep[1, -3:] = False
    if seed == 1:
        keep[1, 3:] = False
    return {"key_keep": keep, "query_keep": query_keep} if cross else {"keep": keep}


def mine(x, lengths, axis):
    """This rank's piece."""
    return None if x is None else x.split(list(lengths), axis)[dist.get_rank()]
