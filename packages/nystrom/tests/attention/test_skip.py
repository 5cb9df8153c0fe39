import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from nystrom.attention.methods.nystrom import nystrom_attention
from nystrom.attention.parts.landmark_sums import landmark_sums
from nystrom.attention.skip import DepthwiseSkip, depthwise_skip, padded_values_and_buffer

pytestmark = pytest.mark.usefixtures("of_a_cpu")


def draw(seed, b, h, n, e, size, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    v = torch.randn(b, h, n, e, generator=g, dtype=torch.float64)
    return v.to(dtype), torch.randn(h, 1, size, 1, generator=g, dtype=torch.float64).to(dtype)


def by_token(v):
    """The same values, laid out token by token as by a projection."""
    return v.transpose(1, 2).contiguous().transpose(1, 2)


def by_width(x):
    """The same numbers, of which those of a token are not neighbours."""
    return x.mT.contiguous().mT


@settings(deadline=None, max_examples=20)
@given(
    n=st.integers(1, 100),
    size=st.sampled_from([1, 3, 33, 35]),
    seed=st.integers(0, 999),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    laid_out=st.sampled_from([torch.Tensor.contiguous, by_token, by_width]),
)
def test_it_is_the_convolution_of_torch_with_its_gradients(n, size, seed, dtype, laid_out):
    v, w = draw(seed, 2, 3, n, 4, size, dtype)
    v, w = laid_out(v).requires_grad_(), w.requires_grad_()
    # The oracle runs in float64: torch's own float32 kernel gradient is wrong at some of these lengths.
    v64, w64 = (x.detach().double().requires_grad_() for x in (v, w))
    out, expected = depthwise_skip(v, w), F.conv2d(v64, w64, padding=(size // 2, 0), groups=3)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
    # Rounding of sums of `size` (output) and n e b (kernel gradient) products.
    close = {"rtol": 1e-4, "atol": 2e-4} if dtype == torch.float32 else {"rtol": 1e-10, "atol": 1e-11}
    torch.testing.assert_close(out.double(), expected, **close)
    for ours, theirs in zip(
        torch.autograd.grad(out, (v, w), laid_out(grad)),
        torch.autograd.grad(expected, (v64, w64), grad.double()),
        strict=True,
    ):
        torch.testing.assert_close(ours.double(), theirs, **close)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("keep", [None, torch.arange(35) > 3])
@pytest.mark.parametrize("laid_out", [torch.Tensor.contiguous, by_token, by_width])
def test_what_it_is_added_to_passes_through(laid_out, keep, dtype):
    v, w = draw(0, 1, 2, 35, 4, 5, dtype)
    v, w, to = laid_out(v).requires_grad_(), w.requires_grad_(), draw(1, 1, 2, 35, 4, 5, dtype)[0].requires_grad_()
    keep = None if keep is None else keep[None]
    before, out, alone = to.detach().clone(), depthwise_skip(v, w, keep=keep, to=to), depthwise_skip(v, w, keep=keep)
    # One sum, of the same two numbers.
    torch.testing.assert_close(out, alone + to, rtol=0, atol=0)
    assert torch.equal(to, before)
    with torch.no_grad():
        assert torch.equal(depthwise_skip(v, w, keep=keep, to=before), out)
    grad = torch.randn_like(out)
    grads = torch.autograd.grad(out, (v, w, to), grad)
    assert torch.equal(grads[2], grad)
    for ours, wanted in zip(grads, torch.autograd.grad(alone, (v, w), grad), strict=False):
        assert torch.equal(ours, wanted)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("laid_out", [torch.Tensor.contiguous, by_token, by_width])
def test_pieces_meet_without_a_seam(laid_out, dtype):
    # So wide that a piece holds 32 to 256 tokens, with a mask that ends inside a piece.
    v, w = draw(3, 2, 1, 300, 4096, 9, dtype)
    keep = torch.arange(300)[None] < torch.tensor([[300], [170]])
    v = laid_out(v).requires_grad_()
    w = w.requires_grad_()
    out = depthwise_skip(v, w, keep=keep)
    real = keep[:, None, :, None]
    v64, w64 = v.detach().double().requires_grad_(), w.detach().double().requires_grad_()
    expected = F.conv2d(v64 * real, w64, padding=(4, 0)) * real
    close = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 1e-10, "atol": 1e-10}
    torch.testing.assert_close(out.double(), expected, **close)
    (ours, of_w), (theirs, of_w64) = (
        torch.autograd.grad(x.square().sum(), y) for x, y in ((out, (v, w)), (expected, (v64, w64)))
    )
    torch.testing.assert_close(ours.double(), theirs, **close)
    # Sums of two million products.
    torch.testing.assert_close(of_w.double(), of_w64, rtol=1e-4, atol=1e-4 * float(of_w64.abs().max()))


@pytest.mark.parametrize("n", [35, 2100])
def test_a_frozen_kernel_has_no_gradient_and_the_others_are_the_same(n):
    v, w = draw(0, 1, 2, n, 4, 5, torch.float32)
    v.requires_grad_()
    (alone,) = torch.autograd.grad(nystrom_attention(v, v, v, num_landmarks=4, skip=w).square().sum(), v)
    w.requires_grad_()
    both = torch.autograd.grad(nystrom_attention(v, v, v, num_landmarks=4, skip=w).square().sum(), (v, w))
    assert torch.equal(alone, both[0])


def test_what_it_is_added_to_is_never_overwritten():
    v, w = draw(0, 1, 2, 35, 4, 5, torch.float32)
    for laid_out in (torch.Tensor.contiguous, by_token):
        to = laid_out(v + 1)
        before = to.clone()
        with torch.no_grad():
            depthwise_skip(laid_out(v), w, to=to)
        assert torch.equal(to, before)


def test_gradients_of_single_samples():
    v, w = draw(7, 3, 2, 20, 3, 5)

    def loss(w, v):
        return depthwise_skip(v[None], w, to=v[None]).sin().sum()

    together = torch.func.vmap(torch.func.grad(loss), (None, 0))(w, v)
    for i in range(3):
        leaf = w.clone().requires_grad_()
        (alone,) = torch.autograd.grad(loss(leaf, v[i]), leaf)
        torch.testing.assert_close(together[i], alone, rtol=1e-10, atol=1e-11)


def test_gradients_are_right():
    v, w = (x.requires_grad_() for x in draw(0, 1, 2, 35, 1, 5))
    assert torch.autograd.gradcheck(depthwise_skip, (v, w))
    to = torch.zeros_like(v).requires_grad_()
    assert torch.autograd.gradcheck(lambda *x: depthwise_skip(x[0], x[1], to=x[2]), (v, w, to))
    assert torch.autograd.gradgradcheck(depthwise_skip, (v, w), fast_mode=True)


def test_the_values_have_one_gradient():
    v, w = (x.requires_grad_() for x in draw(6, 2, 2, 40, 3, 5))
    q, landmarks, middle = draw(7, 2, 2, 40, 3, 5)[0], *(draw(seed, 2, 2, 4, 3, 5)[0] for seed in (8, 9))
    grads = []
    for create_graph in (False, True):
        values, room = padded_values_and_buffer(v, w[:, 0, :, 0])
        out = landmark_sums(room, q, landmarks, middle, values, w[:, 0, :, 0], keep=None, scale=1.0)
        made = (values * values + out.sin()).sum()
        grads.append(torch.autograd.grad(made, (v, w), create_graph=create_graph))
    # With a graph, nothing is computed in place.
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-12, atol=1e-12)
    out = (q @ landmarks.mT).softmax(-1) @ middle + F.conv2d(v, w, padding=(2, 0), groups=2)
    wanted = torch.autograd.grad((v * v + out.sin()).sum(), (v, w))
    torch.testing.assert_close(grads[0], wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("before", [0, 3, 40])
def test_padding_changes_nothing_and_holes_are_positions(before):
    v, w = draw(1, 1, 2, 20, 3, 7)
    padded = F.pad(v, (0, 0, before, 5), value=torch.nan)
    keep = F.pad(torch.ones(1, 20, dtype=torch.bool), (before, 5))
    keep[0, before + 4] = False
    out = depthwise_skip(padded, w, keep=keep)
    holed = v.clone()
    holed[:, :, 4] = 0
    expected = F.conv2d(holed, w, padding=(3, 0), groups=2)
    expected[:, :, 4] = 0
    torch.testing.assert_close(out[:, :, before : before + 20], expected, rtol=1e-12, atol=1e-13)
    assert not out[:, :, :before].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_and_autocast(dtype):
    v, w = draw(2, 1, 2, 70, 3, 7, torch.float32)
    expected = depthwise_skip(v, w)
    with torch.autocast("cpu", dtype=dtype):
        cast = depthwise_skip(v, w)
    assert cast.dtype == dtype
    # One rounding of the inputs (2^-9 for bfloat16) in sums of seven terms of size one.
    torch.testing.assert_close(cast.float(), expected, rtol=0, atol=0.06)
    torch.testing.assert_close(cast, depthwise_skip(v.to(dtype), w.to(dtype)), rtol=0, atol=0)


def test_the_default_device_plays_no_part():
    v, w = torch.randn(1, 2, 40, 3, dtype=torch.float64), torch.randn(2, 1, 5, 1, dtype=torch.float64)
    expected = depthwise_skip(v, w)
    with torch.device("meta"):
        torch.testing.assert_close(depthwise_skip(v, w), expected)


def test_it_compiles_and_exports_at_any_length():
    skip = DepthwiseSkip(2, 7).double()
    v, _ = draw(3, 2, 2, 50, 3, 7)
    gradients = []
    for apply in (skip, torch.compile(skip, fullgraph=True, backend="aot_eager")):
        skip.zero_grad()
        out = apply(v)
        out.square().sum().backward()
        gradients.append((out, skip.weight.grad.clone()))
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-10, atol=1e-11)
    exported = torch.export.export(skip, (v,), dynamic_shapes={"v": {2: torch.export.Dim.DYNAMIC}})
    torch.testing.assert_close(exported.module()(v[:, :, :9]), skip(v[:, :, :9]))


def test_the_kernel_has_the_layout_of_conv2d():
    conv = torch.nn.Conv2d(4, 4, (9, 1), padding=(4, 0), groups=4, bias=False)
    skip = DepthwiseSkip(4, 9)
    skip.load_state_dict(conv.state_dict())
    v, _ = draw(4, 2, 4, 30, 5, 9, torch.float32)
    torch.testing.assert_close(skip(v), conv(v), rtol=1e-5, atol=1e-5)


@pytest.mark.refuses
def test_bad_kernels_and_masks_raise():
    v, w = draw(5, 2, 2, 9, 3, 7)
    with pytest.raises(ValueError, match="conv_kernel_size is 8; expected an odd number"):
        DepthwiseSkip(2, 8)
    with pytest.raises(ValueError, match="conv_kernel_size is 0"):
        DepthwiseSkip(2, 0)
    with pytest.raises(ValueError, match="odd kernel size"):
        depthwise_skip(v, w[:, :, :6])
    with pytest.raises(ValueError, match="with h = 1 heads"):
        depthwise_skip(v, w[:1])
    with pytest.raises(ValueError, match=r"keep has shape \(2, 8\)"):
        depthwise_skip(v, w, keep=torch.ones(2, 8, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"to has shape .* but v has"):
        depthwise_skip(v, w, to=v[:, :, 1:])


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
@pytest.mark.parametrize("laid_out", [torch.Tensor.contiguous, by_token, by_width])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("n", "size"), [(150, 3), (700, 35)])
def test_a_token_that_is_not_finite_reaches_those_within_half_a_kernel(n, size, dtype, laid_out, wrong):
    v, w = draw(0, 2, 3, n, 4, size, dtype)
    clean, soiled, place = laid_out(v), laid_out(v.clone()), n // 2 + 1
    soiled[1, 2, place] = wrong
    reached = torch.zeros(2, 3, n, dtype=torch.bool)
    reached[1, 2, place - size // 2 : place + size // 2 + 1] = True
    results = []
    for x in (clean, soiled):
        leaf = torch.zeros_like(x, requires_grad=True)
        # A number that is not finite as a token, and as a gradient
        results.append((depthwise_skip(x, w), torch.autograd.grad(depthwise_skip(leaf, w), leaf, x)[0]))
    for expected, found in zip(*results, strict=True):
        assert torch.equal(~found.isfinite().all(dim=-1), reached)
        torch.testing.assert_close(found[~reached], expected[~reached])


# Short, and so long that attention works in stretches of tokens.
@pytest.mark.parametrize("n", [41, 2100])
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_gradients_in_a_batch_are_taken_by_vmap_and_raise_otherwise(n):
    g = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, 2, n, 4, generator=g, dtype=torch.float64) for _ in range(3)]
    inputs = [x.requires_grad_() for x in (*inputs, draw(0, 1, 2, 1, 1, 5)[1])]

    def attend(q, k, v, w):
        return nystrom_attention(q, k, v, num_landmarks=4, skip=w)

    grads = torch.randn(3, 1, 2, n, 4, generator=g, dtype=torch.float64)
    with pytest.raises(RuntimeError, match=r"is_grads_batched.*torch\.vmap over .*torch\.func\.vjp"):
        torch.autograd.grad(attend(*inputs), inputs, grads, is_grads_batched=True)
    batched, out = torch.vmap(torch.func.vjp(attend, *inputs)[1])(grads), attend(*inputs)
    outside = torch.vmap(lambda grad: torch.autograd.grad(out, inputs, grad, retain_graph=True))(grads)
    one_by_one = [torch.autograd.grad(attend(*inputs), inputs, grad) for grad in grads]
    for *together, alone in zip(batched, outside, zip(*one_by_one, strict=True), strict=True):
        for each in together:
            torch.testing.assert_close(each, torch.stack(alone), rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("shape", [(0, 3, 9, 4), (2, 3, 0, 4)], ids=["no sequence", "no token"])
@pytest.mark.parametrize("graph", [False, True])
def test_of_nothing_the_gradient_of_the_kernel_is_zero(shape, graph):
    v, weight = torch.randn(shape, requires_grad=True), torch.randn(3, 1, 5, 1, requires_grad=True)
    of_values, of_weight = torch.autograd.grad(depthwise_skip(v, weight).sum(), (v, weight), create_graph=graph)
    assert of_values.shape == shape
    assert torch.equal(of_weight, torch.zeros_like(weight))
