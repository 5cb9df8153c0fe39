"""The running estimate of a layer's error, against the error that all queries have."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from nystrom import MultiheadAttention, NystromAttention
from nystrom.attention.heads import build_attention
from nystrom.attention.skip import depthwise_skip
from nystrom.attention.tracked_error import HALF_LIFE, QUERIES, TrackedError, tracked_errors
from nystrom.shapes import Masks


def draw(b=2, h=2, n=40, d=8, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [2 * torch.randn(b, h, n, d, generator=g, dtype=torch.float64) for _ in range(3)]


def squares(q, k, v, out, keep=None):
    """|out - exact|^2 and |exact|^2 of each query, computed densely; zeros for queries that are not real."""
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if keep is not None:
        scores = scores.masked_fill(~keep[:, None, None], -torch.inf)
    exact = scores.softmax(dim=-1).nan_to_num() @ v
    off, size = (out - exact).square().sum(-1), exact.square().sum(-1)
    return (off, size) if keep is None else (off * keep[:, None], size * keep[:, None])


def true_error(*inputs):
    off, size = squares(*inputs)
    return (off.sum((0, 2)) / size.sum((0, 2))).sqrt()


def look(tracked, q, k, v, out, keep=None, skip=None, scale=None):
    """A step that is looked at, however small the layer is."""
    tracked._begun = False
    tracked(q, k, v, out, masks=Masks(keep), skip=skip, scale=scale)
    return tracked.value()


def attend(q, k, v, keep=None, skip=None, m=4):
    return build_attention("nystrom", num_heads=q.shape[1], head_dim=q.shape[3], num_landmarks=m)(
        q, k, v, keep=keep, skip=skip
    )


# float32 sums of float64 numbers
CLOSE = {"rtol": 1e-5, "atol": 1e-6, "check_dtype": False}


@pytest.mark.parametrize("taps", [0, 5, 33])
@pytest.mark.parametrize("masked", [False, True])
def test_it_is_the_error_of_all_queries_where_all_are_taken(masked, taps):
    q, k, v = draw(n=QUERIES + 3 if masked else QUERIES)
    keep = None
    if masked:
        keep = torch.ones(2, QUERIES + 3, dtype=torch.bool)
        keep[0, :3] = keep[1, 0] = keep[1, 6:9] = False
    skip = torch.randn(2, 1, taps, 1, dtype=torch.float64) if taps else None
    out = attend(q, k, v, keep)
    expected = true_error(q, k, v, out, keep)
    assert expected.min() > 1e-3
    if skip is not None:
        out = depthwise_skip(v, skip, keep=keep, to=out)
    torch.testing.assert_close(look(TrackedError(2), q, k, v, out, keep, skip=skip), expected, **CLOSE)


def test_many_steps_come_near_the_error_of_all_queries():
    q, k, v = draw(b=1, n=200, h=3)
    out, tracked = attend(q, k, v), TrackedError(3)
    for _ in range(60):
        found = look(tracked, q, k, v, out)
    expected = true_error(q, k, v, out)
    # Some 40 looks at a head, of 8 queries each: the standard error of the root of the ratio is below 5 %.
    assert ((found / expected - 1).abs() < 0.1).all()


def test_each_query_has_its_turn_and_none_is_taken_twice_in_a_step():
    tracked, q = TrackedError(1), torch.zeros(1, 1, 64, 1)
    taken = []
    for step in range(64):
        tracked.restart(step)
        places = tracked._sample(q, None)[0][0]
        assert len(places.unique()) == QUERIES
        taken += places.tolist()
    counts = torch.bincount(torch.tensor(taken), minlength=64)
    # 64 steps of 8 of 64 queries: 8 times each, if perfectly even
    assert counts.min() >= 6
    assert counts.max() <= 10


def test_padding_around_moves_no_query_and_a_mask_of_ones_is_none():
    q, k, v = draw(b=1, n=30)
    out = attend(q, k, v)
    wide = [torch.full((1, 2, 50, 8), torch.nan, dtype=torch.float64) for _ in range(4)]
    for x, y in zip(wide, (q, k, v, out), strict=True):
        x[:, :, 7:37] = y
    keep = torch.zeros(1, 50, dtype=torch.bool)
    keep[:, 7:37] = True
    alone, ones, padded = TrackedError(2), TrackedError(2), TrackedError(2)
    for _ in range(3):
        look(alone, q, k, v, out)
        look(ones, q, k, v, out, torch.ones(1, 30, dtype=torch.bool))
        look(padded, *wide, keep)
    torch.testing.assert_close(ones._sums, alone._sums, rtol=1e-6, atol=0)
    torch.testing.assert_close(padded._sums, alone._sums, rtol=1e-6, atol=0)


def test_what_has_no_query_or_no_number_changes_nothing():
    q, k, v = draw(n=20)
    out, tracked = attend(q, k, v), TrackedError(2)
    assert tracked.value().isnan().all()
    nothing = torch.zeros(2, 20, dtype=torch.bool)
    assert look(tracked, q, k, v, out, nothing).isnan().all()
    assert look(tracked, q[:0], k[:0], v[:0], out[:0]).isnan().all()
    before = look(tracked, q, k, v, out)
    half = nothing.clone()
    half[0] = True
    for given in ((out, nothing), (out * torch.nan, None), (out, half)):
        assert look(tracked, q, k, v, *given).isfinite().all()
    assert before.isfinite().all()
    torch.testing.assert_close(look(tracked.eval(), q, k, v, out * 9), tracked.value(), rtol=0, atol=0)


def test_a_step_counts_half_after_the_half_life():
    """Two looks of a known error each: 0 at queries of squared norm B, then 1."""
    q, k, v = draw(b=1, h=1, n=QUERIES)
    exact = attend(q, k, v, m=QUERIES)
    tracked = TrackedError(1)
    look(tracked, q, k, v, exact)
    tracked._passed = HALF_LIFE - 1
    found = look(tracked, q, k, v, 0 * exact)
    torch.testing.assert_close(found, torch.tensor([(1 / 1.5) ** 0.5]), **CLOSE)
    for _ in range(4):
        assert look(TrackedError(1), q, k, v, 0 * exact) == 1


def test_small_layers_are_looked_at_some_steps_apart_and_large_ones_in_each():
    small, large = TrackedError(2), TrackedError(2)
    counts = {id(small): 0, id(large): 0}
    for _ in range(33):
        for each, x in ((small, torch.zeros(1, 2, 4, 8)), (large, torch.empty(1, 2, 2**13, 128))):
            counts[id(each)] += each._steps_since(x) > 0
    assert list(counts.values()) == [3, 33]


@pytest.mark.parametrize("method", ["softmax", "nystrom", "near_far", "performer", "reformer", "linformer"])
def test_exact_layers_read_nothing_but_rounding(method):
    torch.manual_seed(0)
    options = {"linformer": {"max_length": 64, "num_features": 8}}.get(method, {})
    layer = MultiheadAttention(32, 4, method=method, track_error=True, **options)
    x = torch.randn(2, 33, 32)
    for _ in range(120):
        layer(x, x, x)
    error = layer.tracked_error()
    assert error.shape == (4,)
    exact = method in ("softmax", "nystrom", "near_far")
    # float32 rounding of outputs of size one
    assert (error < 2e-6).all() if exact else (error > 1e-3).all()


def train(layer, steps=5):
    """Some steps with dropout, a mask and random landmarks; the weights, and torch's random state."""
    torch.manual_seed(3)
    x, ignore = torch.randn(2, 50, 24), torch.zeros(2, 50, dtype=torch.bool)
    ignore[0, 40:] = True
    optimizer = torch.optim.Adam(layer.parameters(), 1e-2)
    for mask in (None, ignore) * steps:
        optimizer.zero_grad()
        nn.functional.dropout(layer(x, x, x, mask)[0], 0.1).square().mean().backward()
        optimizer.step()
    return layer.state_dict(), torch.random.get_rng_state()


def test_training_is_bit_by_bit_that_without():
    torch.manual_seed(0)
    plain = NystromAttention(24, 3, num_landmarks=5, landmarks="uniform", conv_kernel_size=7)
    tracked = NystromAttention(24, 3, num_landmarks=5, landmarks="uniform", conv_kernel_size=7, track_error=True)
    tracked.load_state_dict(plain.state_dict())
    (expected, random), (found, random_found) = train(plain), train(tracked)
    assert list(found) == list(expected)
    for name in expected:
        assert torch.equal(found[name], expected[name])
    assert torch.equal(random, random_found)
    assert (tracked.tracked_error() > 1e-3).any()


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_checkpoint_computes_again_is_no_step(reentrant):
    layers = [NystromAttention(16, 2, num_landmarks=4, self_attention=True, track_error=True) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    x = torch.randn(2, 40, 16, generator=torch.Generator().manual_seed(0), requires_grad=True)
    for _ in range(3):
        layers[0](x, x, x)[0].sum().backward()
        checkpoint(layers[1], x, x, x, use_reentrant=reentrant)[0].sum().backward()
    plain, again = (layer.tracked_error() for layer in layers)
    assert (plain > 1e-3).any()
    assert torch.equal(plain, again)
    assert layers[0].tracked._passed == layers[1].tracked._passed > 0


def test_cross_attention_and_layers_without_a_batch_are_tracked():
    torch.manual_seed(0)
    layer = NystromAttention(12, 2, num_landmarks=4, conv_kernel_size=None, track_error=True)
    x, y = torch.randn(2, 9, 12), torch.randn(2, 30, 12)
    layer(x, y, y)
    assert layer.tracked_error().isfinite().all()
    layer.tracked.restart()
    assert layer.tracked_error().isnan().all()
    layer(x[0], x[0], x[0])
    assert layer.tracked_error().isfinite().all()


def test_it_compiles_into_one_graph_and_says_what_the_plain_layer_says():
    torch.manual_seed(0)
    layer = NystromAttention(16, 2, num_landmarks=4, conv_kernel_size=5, track_error=True)
    other = copy.deepcopy(layer)
    compiled = torch.compile(other, fullgraph=True, backend="aot_eager")
    x, ignore = torch.randn(2, 20, 16), torch.zeros(2, 20, dtype=torch.bool)
    ignore[0, 14:] = True
    for _ in range(3):
        layer.tracked._begun = False
        expected, found = layer(x, x, x, ignore)[0], compiled(x, x, x, ignore)[0]
        torch.testing.assert_close(found, expected)
    assert other.tracked._step == layer.tracked._step == 3
    # float32 rounding
    torch.testing.assert_close(other.tracked_error(), layer.tracked_error(), rtol=1e-4, atol=1e-6)


@pytest.mark.refuses
def test_what_cannot_keep_it_raises_by_name():
    layer = NystromAttention(8, 2, num_landmarks=4, conv_kernel_size=None, track_error=True)
    x = torch.randn(1, 9, 8)
    with pytest.raises(ValueError, match=r"track_error is True in training inside torch\.func"):
        torch.func.grad(lambda x: layer(x, x, x)[0].sum())(x)
    with pytest.raises(ValueError, match=r"inside torch\.export"):
        torch.export.export(layer, (x, x, x))
    torch.export.export(layer.eval(), (x, x, x))
    copied = layer.train()._replicate_for_data_parallel()
    copied.tracked = layer.tracked._replicate_for_data_parallel()
    with pytest.raises(ValueError, match=r"nn\.DataParallel"):
        copied.tracked(*torch.zeros(4, 1, 2, 9, 4), masks=Masks(), skip=None, scale=None)
    with pytest.raises(ValueError, match="track_error is False, so there is no estimate"):
        NystromAttention(8, 2).tracked_error()
    with pytest.raises(ValueError, match="track_error is 1; expected True or False"):
        NystromAttention(8, 2, track_error=1)
    with pytest.raises(ValueError, match="Linear has no layer that tracks its error"):
        tracked_errors(nn.Linear(2, 2))


def test_a_model_gives_its_layers_by_name():
    model = nn.Sequential(NystromAttention(8, 2, track_error=True), NystromAttention(8, 2))
    assert {name: error.shape for name, error in tracked_errors(model).items()} == {"0": (2,)}
    # Casting a model leaves the sums as they are.
    assert model.to(torch.bfloat16)[0].tracked._sums.dtype == torch.float32
