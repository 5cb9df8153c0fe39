"""Heavy keys and clusters chosen by kernels are those chosen by torch; without a GPU kernels run in the interpreter."""

import functools

import pytest
import torch

pytest.importorskip("triton")

from nystrom.attention.methods.near_far import near_far_attention
from nystrom.attention.options import NearFarOptions
from nystrom.attention.parts.clusters import QUERY_MEANS, choose
from nystrom.gpu.near_far import choice
from nystrom.gpu.near_far.choice import ChoiceOptions, choose_by_kernels, group_size

# Kernels in the interpreter.
pytestmark = pytest.mark.long

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def mask(b, n, seed=3):
    keep = torch.rand(b, n, generator=torch.Generator().manual_seed(seed)) < 0.8
    keep[0, : n // 8] = keep[-1, n - n // 5 :] = False
    return keep.to(DEVICE)


def masked(x, keep):
    return x if keep is None else torch.where(keep[:, None, :, None], x, 0.0)


def by_kernels(q, k, keep, query_keep, options):
    scale = q.shape[-1] ** -0.5 if options.scale is None else options.scale
    sizes = ChoiceOptions(QUERY_MEANS, options.num_heavy, options.num_clusters, options.iterations, scale)
    return choose_by_kernels(q, k, keep, query_keep, sizes)


def assert_same_choice(q, k, keep=None, query_keep=None, *, g=5, m=6, **more):
    options = NearFarOptions(num_heavy=g, num_clusters=m, **more)
    q, k = masked(q, query_keep), masked(k, keep)
    mine = by_kernels(q, k, keep, query_keep, options)
    theirs = choose(q.float(), k.float(), keep, query_keep, options)
    assert [x.dtype for x in mine] == [torch.int64, torch.bool, torch.int32]
    for x, y in zip(mine, theirs, strict=True):
        assert torch.equal(x.long(), y.long())
    return mine


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize(
    ("n", "s", "d", "m"),
    [
        pytest.param(40, 40, 8, 4, id="equal-segments"),
        pytest.param(53, 53, 5, 7, id="unequal-segments"),
        pytest.param(37, 131, 16, 3, id="other-queries"),
        # more than a tile of keys, of sampled keys and of centres
        pytest.param(700, 700, 20, 70, id="several-tiles"),
        pytest.param(5, 90, 8, 6, id="few-queries"),
    ],
)
def test_the_choice_is_that_of_torch(n, s, d, m, is_masked, dtype):
    q, k = draw(2, 2, n, d, dtype=dtype), draw(2, 2, s, d, seed=1, dtype=dtype)
    keep = mask(2, s) if is_masked else None
    assert_same_choice(q, k, keep, keep if n == s else None, m=m)


def test_masks_of_queries_alone_and_of_both_sides():
    q, k = draw(3, 1, 60, 8), draw(3, 1, 90, 8, seed=1)
    assert_same_choice(q, k, None, mask(3, 60))
    assert_same_choice(q, k, mask(3, 90), mask(3, 60, seed=5))
    # One mask for the whole batch takes no memory of its own.
    assert_same_choice(q, k, mask(1, 90).expand(3, -1), None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_number_of_clusters_is_chosen_by_kernels(dtype, monkeypatch):
    q, k = draw(1, 1, 20, 8, dtype=dtype), draw(1, 1, 280, 8, seed=1, dtype=dtype)
    assert_same_choice(q, k, m=260)
    monkeypatch.setattr("nystrom.attention.methods.near_far.choose", None)
    everything = torch.ones(1, 280, dtype=torch.bool, device=DEVICE)
    near_far_attention(q, k, k, num_heavy=5, num_clusters=260, key_keep=everything, backend="triton")


@pytest.mark.parametrize(
    "change", [{"iterations": 1}, {"iterations": 2}, {"g": 0}, {"m": 1}, {"g": 70}, {"scale": 3.0}]
)
def test_any_sizes(change):
    assert_same_choice(draw(2, 2, 90, 8), draw(2, 2, 90, 8, seed=1), mask(2, 90), mask(2, 90), **change)


def test_of_equal_keys_the_first_are_heavy_and_of_equal_centres_the_last_wins():
    kinds = draw(1, 1, 3, 8)
    k = kinds[:, :, torch.arange(300, device=DEVICE) % 3]
    for keep in (None, mask(1, 300)):
        heavy, exists, cluster = assert_same_choice(draw(1, 1, 300, 8, seed=2), k, keep, keep, m=66, g=7)
        assert exists.all()
        assert cluster.max() == 66
        # Two keys heavier than all others stand for all equal ones: the earliest places.
        assert heavy.max() < 100
    assert_same_choice(draw(1, 1, 100, 8), draw(1, 1, 1, 8, seed=1).expand(1, 1, 100, 8), m=6)


@pytest.mark.parametrize("g", [1, 5, 40, 149])
def test_heavy_keys_are_found_among_groups(g, monkeypatch):
    k = draw(2, 2, 300, 8, seed=1)
    # Many keys of one group are heavy, some of them equal, and some sequences have fewer real keys.
    k[0, 0, 32:48] = 3 * k[0, 0, 40:41]
    few = torch.zeros(2, 300, dtype=torch.bool, device=DEVICE)
    few[0, 3:300:9] = few[1, 250:252] = True
    calls = [
        functools.partial(by_kernels, draw(2, 2, 300, 8), k, keep, keep, NearFarOptions(num_heavy=g, num_clusters=6))
        for keep in (None, mask(2, 300), few)
    ]
    whole = [call() for call in calls]
    monkeypatch.setattr(choice, "_COMPARED_WHOLE", 64)
    assert group_size(300, g) > 1
    choice.program_of.cache_clear()
    grouped = [call() for call in calls]
    choice.program_of.cache_clear()
    assert all(torch.equal(x, y) for each in zip(whole, grouped, strict=True) for x, y in zip(*each, strict=True))


@pytest.mark.parametrize("s", [1025, 5000, 131_072])
@pytest.mark.parametrize("g", [1, 48, 500, 1020, 100_000])
def test_there_are_as_many_groups_as_heavy_keys(s, g):
    size = group_size(s, g)
    assert size == 1 or s // size >= g
    assert group_size(1024, g) == group_size(s, 0) == 1


def test_fewer_keys_than_clusters_or_heavy_keys_and_none():
    keep = torch.zeros(3, 40, dtype=torch.bool, device=DEVICE)
    keep[0, 11:15] = keep[1, 5] = True
    q, k = draw(3, 2, 40, 8), draw(3, 2, 40, 8, seed=1)
    _, exists, cluster = assert_same_choice(q, k, keep, keep, g=3, m=8)
    assert exists.sum(dim=-1).tolist() == [[3, 3], [1, 1], [0, 0]]
    assert (cluster[2] == 8).all()
    # Fewer positions than heavy keys.
    assert_same_choice(q, k[:, :, :9], g=12, m=4)


def test_padding_changes_nothing():
    q, k, options = draw(1, 2, 80, 8), draw(1, 2, 80, 8, seed=1), NearFarOptions(num_heavy=5, num_clusters=9)
    keep = torch.zeros(1, 120, dtype=torch.bool, device=DEVICE)
    keep[:, 17:97] = True
    heavy, exists, cluster = by_kernels(q, k, None, None, options)
    q, k = (torch.nn.functional.pad(x, (0, 0, 17, 23)) for x in (q, k))
    far, there, padded = by_kernels(q, k, keep, keep, options)
    assert torch.equal(far, heavy + 17)
    assert torch.equal(there, exists)
    assert torch.equal(padded[:, :, 17:97], cluster)


# The interpreter computes with numpy, which reports overflows.
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
def test_huge_keys_have_a_cluster():
    k = draw(1, 1, 60, 8, seed=1) * 1e25
    heavy, exists, cluster = by_kernels(draw(1, 1, 60, 8), k, None, None, NearFarOptions(num_heavy=3, num_clusters=4))
    assert exists.all()
    assert heavy.unique().numel() == 3
    assert ((cluster >= 0) & (cluster <= 4)).all()
    assert (cluster == 4).sum() == 3


def test_projections_are_read_in_their_layout():
    q, k = (draw(2, 50, 3, 8, seed=i).transpose(1, 2) for i in range(2))
    assert_same_choice(q, k)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("d", "m"), [(16, 16), (64, 64), (128, 64), (100, 200), (64, 640), (128, 1024)])
@pytest.mark.parametrize("is_masked", [False, True])
def test_the_choice_is_nearly_that_of_torch_at_full_size(dtype, d, m, is_masked):
    q, k = (draw(2, 4, 5000, d, seed=i, dtype=dtype) for i in range(2))
    keep, options = mask(2, 5000) if is_masked else None, NearFarOptions(num_clusters=m)
    q, k = masked(q, keep), masked(k, keep)
    runs = [by_kernels(q, k, keep, keep, options) for _ in range(3)]
    for run in runs[1:]:
        assert all(torch.equal(x, y) for x, y in zip(runs[0], run, strict=True))
    heavy, exists, cluster = choose(q.float(), k.float(), keep, keep, options)
    # Sums in another order may exchange a key with one of nearly the same weight, or with a centre about as near.
    assert torch.equal(exists, runs[0][1])
    mine, theirs = (torch.zeros_like(cluster).scatter(2, x, 1) for x in (runs[0][0], heavy))
    assert (mine != theirs).sum() <= 0.02 * heavy.numel()
    assert (runs[0][2] != cluster).float().mean() < 0.02
