from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from nystrom import build_attention, softmax_attention
from nystrom.attention.methods.performer import draw_projection, performer_attention
from nystrom.kernels import softmax_kernel


def draw(seed, n, s=None, *, d=8, e=4, size=1.0):
    g = torch.Generator().manual_seed(seed)
    shapes = (n, d), (s or n, d), (s or n, e)
    return [size * torch.randn(2, 3, *shape, generator=g, dtype=torch.float64) for shape in shapes]


def rows(seed, r, d=8):
    return draw_projection(r, d, generator=torch.Generator().manual_seed(seed)).double()


def positive_features(x, projection, *, scale):
    exponents = scale**0.5 * (x @ projection.mT) - 0.5 * scale * x.square().sum(-1, keepdim=True)
    return exponents.exp() * projection.shape[0] ** -0.5


@pytest.mark.parametrize("r", [3, 8, 50])
@pytest.mark.parametrize("scale", [None, 0.1])
def test_two_fused_calls_are_the_ratio_of_feature_sums(r, scale):
    q, k, v = draw(0, 9, 14)
    phi_q, phi_k = (positive_features(x, rows(1, r), scale=8**-0.5 if scale is None else scale) for x in (q, k))
    expected = phi_q @ (phi_k.mT @ v) / (phi_q @ phi_k.sum(2)[..., None])
    # float64 rounding of exponents of a few units
    torch.testing.assert_close(performer_attention(q, k, v, rows(1, r), scale=scale), expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("size", [30.0, 300.0])
def test_no_sum_vanishes_however_far_queries_and_keys_are(size):
    q, k, v = draw(2, 9, 14, size=size)
    logs_q, logs_k = (8**-0.25 * x @ rows(3, 20).mT for x in (q, k))
    logs_k = logs_k - 0.5 * 8**-0.5 * k.square().sum(-1, keepdim=True)
    # The n x s weights by logarithms; the sums of the features themselves are 0 or infinite.
    weights = torch.logsumexp(logs_q[..., :, None, :] + logs_k[..., None, :, :], dim=-1).softmax(dim=-1)
    out = performer_attention(q, k, v, rows(3, 20))
    # Exponents of 1e6 at a size of 300, rounded to 2^-33
    torch.testing.assert_close(out, weights @ v, rtol=0, atol=1e-7 * size)


def test_a_constant_value_comes_back():
    q, k, v = draw(4, 9, 14, size=5.0)
    out = performer_attention(q, k, torch.ones_like(v), rows(5, 20))
    torch.testing.assert_close(out, torch.ones_like(out), rtol=1e-12, atol=0)


def test_rows_are_orthogonal_in_blocks_of_the_width():
    projection = rows(6, 19)
    for block in projection.split(8):
        gram = block @ block.mT
        # float32 rounding of an 8-by-8 factor, times norms of about 8
        torch.testing.assert_close(gram, torch.diag(gram.diagonal()), rtol=0, atol=1e-5)
    assert (projection[:8] @ projection[8:16].mT).abs().max() > 1


def test_each_row_is_standard_normal():
    projection = rows(7, 200_000, d=4)
    # Standard errors over 50,000 blocks at least: .0045 of a mean, .0065 of a variance; 5 of them.
    assert (projection.mean(0).abs() < 0.025).all()
    assert ((projection.T @ projection / 200_000 - torch.eye(4)).abs() < 0.035).all()
    # A norm of the distribution chi(4) has mean 1.88 and deviation .68, in any direction.
    norms = projection.norm(dim=-1)
    assert abs(norms.mean() - 1.88) < 0.01
    assert abs(norms.std() - 0.683) < 0.01


def kernel_errors(projection, x, y):
    """Relative errors of the estimates of SM(x, y), one for each block of 4 rows."""
    phi_x, phi_y = (positive_features(z[None], projection, scale=0.5)[0] for z in (x, y))
    estimates = projection.shape[0] * (phi_x * phi_y).view(-1, 4).mean(-1)
    return estimates / softmax_kernel(x[None], y[None], scale=0.5)[0, 0] - 1


def test_the_estimate_is_unbiased_and_better_than_with_independent_rows():
    x = torch.tensor([1.0, 0.3, -0.2, 0.5], dtype=torch.float64)
    y = torch.tensor([1.1, 0.1, 0.3, -0.4], dtype=torch.float64)
    orthogonal = kernel_errors(rows(8, 400_000, d=4), x, y)
    independent = torch.randn(400_000, 4, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    independent = kernel_errors(independent, x, y)
    # 5 standard errors of a mean over 100,000 independent blocks
    assert abs(orthogonal.mean()) < 5 * orthogonal.std() / 100_000**0.5
    # Theorem 2 of the paper bounds the gain; here it is a third, and the two variances are known to a few per cent.
    assert orthogonal.var() < 0.8 * independent.var()
    # Four independent rows: exp(c |x + y|^2) - 1 over 4; the fourth moment of the estimate is heavy.
    expected = torch.expm1(0.5 * (x + y).square().sum()) / 4
    torch.testing.assert_close(independent.var(), expected, rtol=0.15, atol=0)


def test_the_error_falls_like_one_over_the_root_of_the_features():
    q, k, v = draw(10, 12, size=0.4)
    exact = softmax_attention(q, k, v)

    def error(r):
        outs = torch.stack([performer_attention(q, k, v, rows(100 + i, r)) for i in range(32)])
        return (outs - exact).square().mean().sqrt()

    small, large = error(64), error(1024)
    # 16 times the features give a quarter of the error; 32 draws of many outputs estimate it to about a tenth.
    assert 3.2 < small / large < 5.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_default_dtype_of_torch_changes_no_draw(dtype):
    q = torch.randn(1, 1, 20, 8)
    expected, before = performer_attention(q, q, q), torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        torch.testing.assert_close(performer_attention(q, q, q), expected, rtol=0, atol=0)
        assert build_attention("performer", num_heads=1, head_dim=8).weights.projection.dtype == dtype
    finally:
        torch.set_default_dtype(before)


def test_a_redraw_is_decided_by_its_generator():
    q, k, v = draw(11, 9)
    layer = build_attention("performer", num_heads=3, head_dim=8, num_features=20)
    before = layer(q, k, v)
    layer.weights.redraw(torch.Generator().manual_seed(3))
    after = layer(q, k, v)
    assert not torch.allclose(before, after)
    torch.testing.assert_close(after, performer_attention(q, k, v, rows(3, 20)), rtol=0, atol=0)


@pytest.mark.long
def test_the_function_without_a_projection_compiles():
    inputs = draw(15, 9)
    compiled = torch.compile(performer_attention, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*inputs), performer_attention(*inputs), rtol=1e-12, atol=0)
    torch.compiler.reset()


@pytest.mark.parametrize("randomness", ["error", "same", "different"])
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_the_function_without_a_projection_maps(randomness):
    q, k, v = draw(15, 9)
    mapped = torch.func.vmap(performer_attention, randomness=randomness)
    together = mapped(*(torch.stack([x, 2 * x]) for x in (q, k, v)))
    for copy, factor in zip(together, (1, 2), strict=True):
        torch.testing.assert_close(copy, performer_attention(factor * q, factor * k, factor * v), rtol=1e-12, atol=0)


@pytest.mark.refuses
@pytest.mark.parametrize(
    ("projection", "message"),
    [
        ([1], "projection is a list; expected a tensor"),
        (
            torch.ones(2, 9, dtype=torch.bool),
            "projection has dtype torch.bool.*masks are given by name",
        ),
    ],
)
def test_what_is_no_projection_raises(projection, message):
    q, k, v = draw(15, 9)
    with pytest.raises(ValueError, match=message):
        performer_attention(q, k, v, projection)


def test_layers_differ_and_a_checkpoint_carries_the_projection():
    q, k, v = draw(12, 9)
    first, second = (build_attention("performer", num_heads=3, head_dim=8, num_features=20) for _ in range(2))
    assert not torch.allclose(first(q, k, v), second(q, k, v))
    assert set(first.state_dict()) == {"weights.projection", "weights.forwards"}
    second.load_state_dict(first.state_dict())
    torch.testing.assert_close(first(q, k, v), second(q, k, v), rtol=0, atol=0)


@pytest.mark.long
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiles"])
def test_redraw_steps_counts_the_forwards_of_training(compiled):
    q, k, v = (x.requires_grad_() for x in draw(13, 9))
    layer = build_attention("performer", num_heads=3, head_dim=8, num_features=20, redraw_steps=3)
    attend = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    seen = []
    for _ in range(7):
        seen.append(layer.weights.projection.clone())
        attend(q, k, v)
    changed = [not torch.equal(x, y) for x, y in pairwise(seen)]
    assert changed == [False, False, True, False, False, True]
    layer.eval()
    torch.testing.assert_close(attend(q, k, v), attend(q, k, v), rtol=0, atol=0)
    torch.compiler.reset()


def test_a_start_from_scratch_draws_and_counts_anew():
    layer = build_attention("performer", num_heads=3, head_dim=8, num_features=20, redraw_steps=3)
    layer(*draw(16, 9))
    before = layer.weights.projection.clone()
    layer.weights.reset_parameters()
    assert layer.weights.forwards == 0
    assert not torch.equal(layer.weights.projection, before)


def test_a_redraw_between_forward_and_backward_leaves_the_gradient():
    q, k, v = (x.requires_grad_() for x in draw(14, 9))
    layer = build_attention("performer", num_heads=3, head_dim=8, num_features=20)
    projection = layer.weights.projection.clone()
    out = layer(q, k, v).sum()
    layer.weights.redraw()
    expected = torch.autograd.grad(performer_attention(q, k, v, projection).sum(), q)
    torch.testing.assert_close(torch.autograd.grad(out, q), expected, rtol=0, atol=0)


@pytest.mark.refuses
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_features": 0}, "num_features is 0"),
        ({"scale": -0.5}, r"scale is -0\.5"),
        ({"projection": torch.ones(4, 5)}, r"projection has shape \(4, 5\); expected \(features, 8\)"),
        ({"projection": torch.ones(0, 8)}, r"projection has shape \(0, 8\); expected \(features, 8\)"),
        ({"projection": torch.ones(4, 8), "generator": torch.Generator()}, "projection and generator are both given"),
    ],
)
def test_bad_options_raise(options, message):
    with pytest.raises(ValueError, match=message):
        performer_attention(*draw(0, 8), **options)


def test_redraws_that_would_never_come_raise():
    with pytest.raises(ValueError, match="redraw_steps is 0; expected a whole number of at least 1"):
        build_attention("performer", num_heads=3, head_dim=8, redraw_steps=0)


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_checkpoint_computes_again_redraws_nothing(reentrant):
    layers = [build_attention("performer", num_heads=3, head_dim=8, num_features=20, redraw_steps=2) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    for step in range(4):
        found = []
        for layer, again in zip(layers, (False, True), strict=True):
            torch.manual_seed(step)
            q, k, v = (x.requires_grad_() for x in draw(13, 9))
            # The dropout of a second pass must find the generator where the first did.
            attend = lambda *x, layer=layer: F.dropout(layer(*x), 0.5)  # noqa: E731
            out = checkpoint(attend, q, k, v, use_reentrant=reentrant) if again else attend(q, k, v)
            out.square().sum().backward()
            found.append(
                [out, q.grad, k.grad, v.grad, layer.weights.projection.clone(), layer.weights.forwards.clone()]
            )
        for plain, other in zip(*found, strict=True):
            torch.testing.assert_close(other, plain, rtol=0, atol=0)
