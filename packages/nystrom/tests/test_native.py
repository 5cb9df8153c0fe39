import os
import shutil
from unittest import mock

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from nystrom import native
from nystrom.attention.fused import fused_softmax, softmax_rows
from nystrom.attention.methods.near_far import near_far_attention
from nystrom.attention.methods.nystrom import nystrom_attention
from nystrom.attention.options import NearFarOptions
from nystrom.attention.parts.block_stretches import attend_in_stretches
from nystrom.attention.parts.clusters import Chosen, choose, nearest_cluster
from nystrom.attention.parts.far_keys import attend_blocks
from nystrom.attention.parts.selected_keys import select_keys
from nystrom.attention.skip import depthwise_skip
from nystrom.landmarks import group_means, segment_means, segments
from nystrom.linalg.pinv import iterate, start_value
from nystrom.shapes import zero_masked

needs_a_compiler = pytest.mark.skipif(shutil.which(os.environ.get("CXX", "c++")) is None, reason="no C++ compiler here")
pytestmark = pytest.mark.usefixtures("of_a_cpu")
ROWS = 3


LAYOUTS = {"heads": (0, 1, 2, 3), "tokens": (0, 2, 1, 3), "width": (0, 1, 3, 2)}


def draw(n, d, e, options, real, dtype, layout):
    """Queries, keys, values of rows, zeros after the real tokens, and what is chosen for them."""
    g = torch.Generator().manual_seed(0)
    keep = torch.arange(n)[None] < real
    q, k, v = (torch.randn(1, ROWS, n, x, generator=g, dtype=dtype) * keep[:, None, :, None] for x in (d, d, e))
    # Each order of axes is its own inverse.
    q, k, v = (x.permute(LAYOUTS[layout]).contiguous().permute(LAYOUTS[layout]) for x in (q, k, v))
    chosen = choose(q, k, None if real == n else keep, None, options)
    q, k, v = (x.flatten(0, 1).requires_grad_() for x in (q, k, v))
    return (q, k, v), Chosen(*(x.flatten(0, 1) for x in chosen))


@pytest.mark.parametrize(
    ("n", "d", "e", "options", "real"),
    [
        (64, 8, 8, NearFarOptions(num_clusters=4, num_heavy=3, block_size=16, reach=8), 64),
        # No heavy keys, no reach, uneven widths, padding
        (256, 5, 7, NearFarOptions(num_clusters=8, num_heavy=0, block_size=8, reach=0), 200),
        (1024, 64, 32, NearFarOptions(), 1000),
        # More blocks than a group holds, and a reach beyond the next block
        (1600, 16, 16, NearFarOptions(block_size=16, reach=40), 1600),
        (64, 8, 1, NearFarOptions(num_clusters=4, num_heavy=3, block_size=16, reach=8), 64),
        # Fewer keys than clusters, and no key at all
        (288, 16, 16, NearFarOptions(num_clusters=40, num_heavy=20, block_size=48, reach=24), 3),
        (160, 16, 16, NearFarOptions(num_clusters=4, num_heavy=2, block_size=20, reach=7), 0),
        # Blocks that select keys, with a rest of queries, and more than there are
        (1600, 16, 12, NearFarOptions(num_clusters=60, num_heavy=9, block_size=40, reach=7, num_selected=19), 1510),
        (96, 16, 16, NearFarOptions(num_clusters=7, num_heavy=0, block_size=32, reach=7, num_selected=99), 60),
        (160, 16, 16, NearFarOptions(num_clusters=4, num_heavy=2, block_size=20, reach=7, num_selected=3), 0),
    ],
)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_blocks_are_the_plain_form_with_its_gradients(n, d, e, options, real, layout, dtype):
    inputs, chosen = draw(n, d, e, options, real, dtype, layout)
    q, k, v = (x.detach().double().requires_grad_() for x in inputs)
    selected = None
    if options.num_selected:
        tokens = (*(x.detach() for x in inputs), (torch.arange(n) < real).expand(ROWS, -1), chosen, options)
        selected = select_keys(*tokens)
        with mock.patch.dict("os.environ", NYSTROM_NATIVE="0"):
            # The same keys in another order
            assert torch.equal(select_keys(*tokens).sort().values, selected.sort().values)
    out = attend_in_stretches(*inputs, chosen, options, selected)
    expected = attend_blocks(q, k, v, chosen, options, selected)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    # Rounding of sums of up to 1,600 terms
    share = 1e-12 if dtype == torch.float64 else 1e-5
    check_like([out], [expected], share)
    found = torch.autograd.grad(out, inputs, grad.to(dtype))
    check_like(found, torch.autograd.grad(expected, (q, k, v), grad), share)


def in_layout(layout, *x):
    return [x.permute(LAYOUTS[layout]).contiguous().permute(LAYOUTS[layout]).requires_grad_() for x in x]


def check_like(found, expected, share):
    for ours, theirs in zip(found, expected, strict=True):
        largest = float(theirs.detach().abs().max())
        torch.testing.assert_close(ours.double(), theirs, rtol=share, atol=share * (1 + largest))


@pytest.mark.parametrize(
    ("n", "s", "d", "e"),
    # Few keys, few queries, neither a multiple of a vector or a stretch; fewer than a vector
    [(1100, 64, 16, 16), (1025, 37, 5, 7), (64, 1100, 16, 16), (37, 1025, 5, 7), (8, 2000, 64, 1), (2000, 1, 8, 8)],
)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_attention_from_many_to_few_is_the_plain_form_with_its_gradients(n, s, d, e, masked, layout, dtype, of_a_cpu):
    if of_a_cpu != "loops of our own":
        pytest.skip("torch's own attention")
    g = torch.Generator().manual_seed(0)
    inputs = [torch.randn(3, 2, *size, generator=g, dtype=torch.float64) for size in ((n, d), (s, d), (s, e))]
    # Scores of up to about 100: some stretches' are far above those before them; float32 rounds them to 1e-5.
    inputs[0] *= 20 * torch.rand(n, 1, generator=g)
    keep = torch.rand(3, s, generator=g) < torch.tensor([[0.9], [0.1], [0.0]]) if masked else None
    if keep is not None:
        inputs[1:] = (zero_masked(x, keep) for x in inputs[1:])
    grad, share = torch.randn(3, 2, n, e, generator=g, dtype=torch.float64), 1e-12 if dtype == torch.float64 else 2e-5
    ours = in_layout(layout, *(x.to(dtype) for x in inputs))
    q, k, v = (x.detach().double().requires_grad_() for x in ours)
    out, expected = fused_softmax(*ours, keep=keep), softmax_rows(q, k, keep=keep) @ v
    check_like([out], [expected], share)
    found, wanted = torch.autograd.grad(out, ours, grad.to(dtype)), torch.autograd.grad(expected, (q, k, v), grad)
    # The caller has put zeros for masked keys, which have no gradient.
    check_like([found[0], *(zero_masked(x, keep) for x in found[1:])], wanted, share)


def test_attention_from_many_to_few_has_second_derivatives(of_a_cpu):
    if of_a_cpu != "loops of our own":
        pytest.skip("the fused call of torch has none")
    x = [torch.randn(1, 1, n, 2, dtype=torch.float64, requires_grad=True) for n in (1024, 3, 3)]
    out = fused_softmax(*x)
    assert "FewAndMany" in type(out.grad_fn).__name__
    (first,) = torch.autograd.grad(out.square().sum(), x[1], create_graph=True)
    found = torch.autograd.grad(first.sum(), x)
    (first,) = torch.autograd.grad((softmax_rows(x[0], x[1]) @ x[2]).square().sum(), x[1], create_graph=True)
    check_like(found, torch.autograd.grad(first.sum(), x), 1e-10)


def test_the_start_of_the_iteration_has_its_gradient():
    # Rows of unequal sums, a negative number, and two columns that tie
    a = torch.randn(4, 7, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    a[0, :, 3], a[1] = a[0, :, 5], 0.5
    a[0, 2, 3], a[0, 2, 5] = 9, 9
    a.requires_grad_()
    found, expected = iterate(a, None, 2), iterate(a, start_value(a), 2)
    check_like([found], [expected], 1e-12)
    grad = torch.randn_like(found)
    check_like(torch.autograd.grad(found, a, grad), torch.autograd.grad(expected, a, grad), 1e-12)


def test_a_batch_of_gradients_is_taken():
    q = torch.randn(1, 1, 20, 4, dtype=torch.float64)
    one, batch = (
        torch.autograd.functional.jacobian(lambda q: nystrom_attention(q, q, q, num_landmarks=5), q, vectorize=each)
        for each in (False, True)
    )
    torch.testing.assert_close(one, batch, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("m", [1, 5, 64, 100])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_iteration_is_that_of_products_with_its_gradients(m, dtype):
    g = torch.Generator().manual_seed(0)
    a = torch.softmax(2 * torch.randn(2, 3, m, m, generator=g, dtype=dtype), dim=-1)
    ours = [x.clone().requires_grad_() for x in (a, start_value(a))]
    plain = [x.detach().double().requires_grad_() for x in ours]
    grad, eye = torch.randn(2, 3, m, m, generator=g, dtype=torch.float64), torch.eye(m, dtype=torch.float64)
    expected = plain[1]
    for _ in range(5):
        az = plain[0] @ expected
        expected = 0.25 * expected @ (13 * eye - az @ (15 * eye - az @ (7 * eye - az)))
    # The products' rounding; each step multiplies it by up to 3.25.
    share = 1e-11 if dtype == torch.float64 else 2e-4
    found = iterate(ours[0], ours[1], 5)
    check_like([found], [expected], share)
    check_like(torch.autograd.grad(found, ours, grad.to(dtype)), torch.autograd.grad(expected, plain, grad), share)


def test_a_matrix_that_is_not_finite_leaves_its_neighbours_alone():
    a = torch.softmax(torch.randn(3, 40, 40), dim=-1)
    alone = iterate(a, start_value(a), 6)
    a[1, 2, 3] = torch.nan
    found = iterate(a, start_value(a), 6)
    assert torch.equal(found[[0, 2]], alone[[0, 2]])
    assert found[1].isnan().any()


@needs_a_compiler
def test_neither_threads_nor_runs_change_a_bit(of_a_cpu):
    if of_a_cpu != "loops of our own":
        pytest.skip("sums of torch's operators depend on the number of threads")
    inputs, chosen = draw(8192, 16, 16, NearFarOptions(), 8000, torch.float32, "tokens")

    def results(threads):
        torch.set_num_threads(threads)
        out = attend_in_stretches(*inputs, chosen, NearFarOptions())
        return out, *torch.autograd.grad(out, inputs, torch.ones_like(out))

    for many, again, one in zip(results(3), results(3), results(1), strict=True):
        assert torch.equal(many, again)
        assert torch.equal(many, one)


@needs_a_compiler
def test_not_a_number_stays_one(of_a_cpu):
    q, k, v = (torch.randn(1, 1, 512, 8) for _ in range(3))
    q[0, 0, 100, 3] = torch.nan
    out = near_far_attention(q, k, v, exact_up_to=0)
    assert out[0, 0, 100].isnan().all()


@needs_a_compiler
def test_what_watches_operators_sees_them(of_a_cpu):
    q = torch.randn(1, 2, 1024, 16)
    with FlopCounterMode(display=False) as counter:
        near_far_attention(q, q, q, exact_up_to=0)
    # At least the windows' scores
    assert counter.get_total_flops() > 2 * 2 * 1024 * 64 * 16


# A segment of one token, several stretches of a segment, and segments of unequal lengths.
@pytest.mark.parametrize(("n", "m"), [(1024, 1024), (2000, 3), (1100, 320), (1536, 64)])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_means_of_segments_are_the_plain_ones(n, m, layout, dtype):
    x = torch.randn(2, 3, n, 5, dtype=dtype, generator=torch.Generator().manual_seed(0))
    x = x.permute(LAYOUTS[layout]).contiguous().permute(LAYOUTS[layout])
    expected = group_means(x, segments(x, m, None), m)
    # Rounding of sums of 667 numbers, relative to 1.
    close = {"rtol": 0, "atol": 1e-14} if dtype == torch.float64 else {"rtol": 0, "atol": 1e-6}
    torch.testing.assert_close(segment_means(x, m), expected, **close)


# Centres twice, of which the last wins; empty ones, or all; lengths with a rest.
@pytest.mark.parametrize(("n", "m", "d", "filled"), [(1003, 37, 5, 30), (8, 64, 64, 64), (65, 3, 16, 0), (1, 1, 1, 1)])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_nearest_centres_are_those_of_the_distances(n, m, d, filled, layout, dtype):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, n, d, generator=g, dtype=dtype).permute(LAYOUTS[layout]).contiguous().permute(LAYOUTS[layout])
    centres = torch.randn(2, 3, m, d, generator=g, dtype=dtype)
    centres[:, :, m // 2] = centres[:, :, 0]
    real = torch.arange(m) < torch.tensor([[m], [filled]])
    found = nearest_cluster(x, centres, real)
    distances = (x[..., None, :] - centres[:, :, None]).square().sum(dim=-1)
    distances = distances.masked_fill(~real[:, None, None], torch.inf)
    nearest = distances.amin(dim=-1, keepdim=True)
    # Centres this near are drawn only by the same one.
    expected = (distances <= nearest + 1e-5).mul(torch.arange(m)).amax(dim=-1)
    assert torch.equal(found, expected)


def loop(name):
    """A call of three tensors (2, 3, 1100, 8) that a loop of our own computes, and its inputs."""
    taps = torch.randn(3, 1, 5, 1, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    calls = {
        "few keys": lambda q, k, v: fused_softmax(q, k[:, :, :40], v[:, :, :40]),
        "few queries": lambda q, k, v: fused_softmax(q[:, :, :40], k, v),
        "nystrom": lambda q, k, v: nystrom_attention(q, k, v, num_landmarks=20, skip=taps),
        "near_far": lambda q, k, v: near_far_attention(q, k, v, exact_up_to=0, num_heavy=5, num_clusters=7),
        "the skip": lambda q, k, v: depthwise_skip(v, taps, to=q * k),
        "the iteration": lambda q, k, v: (
            iterate((q[:, :, :8] + 4 * v[:, :, :8]).softmax(dim=-1), None, 5) * k[:, :, :8]
        ),
        "the iteration from a start": lambda q, k, v: (
            iterate(q[:, :, :8].softmax(dim=-1), v[:, :, :8], 2) * k[:, :, :8]
        ),
    }
    g = torch.Generator().manual_seed(0)
    return calls[name], [torch.randn(2, 3, 1100, 8, generator=g, dtype=torch.float64) for _ in range(3)]


every_loop = pytest.mark.parametrize(
    "name",
    [
        *("few keys", "few queries", "nystrom", "near_far", "the skip"),
        *("the iteration", "the iteration from a start"),
    ],
)


def with_axes_turned(x):
    """The same numbers in memory of another order."""
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def with_a_sign(x):
    """The same numbers, which a bit makes of their negatives in memory, as in a view of a conjugate."""
    return torch._neg_view(-x) if x.is_floating_point() else x


@needs_a_compiler
@every_loop
@pytest.mark.parametrize("memory", [with_axes_turned, with_a_sign])
@pytest.mark.parametrize("of", ["inputs", "saved tensors", "gradients"])
def test_memory_says_nothing_of_what_a_tensor_holds(name, memory, of, of_a_cpu):
    if of_a_cpu != "loops of our own":
        pytest.skip("torch's fused call reads what it saved in its own layout alone")
    call, inputs = loop(name)
    results = []
    for its in (lambda x: x, memory):
        leaves = [(its(x) if of == "inputs" else x).detach().requires_grad_() for x in inputs]
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, its if of == "saved tensors" else lambda x: x):
            out = call(*leaves)
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
        results.append((out, *torch.autograd.grad(out, leaves, its(grad) if of == "gradients" else grad)))
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("taps", [1, 2, 3, 4, 8, 20])
def test_the_convolution_takes_any_number_of_taps(taps, of_a_cpu):
    if of_a_cpu != "loops of our own" or not native.runs_natively(torch.zeros(1, 1, 1, 1)):
        pytest.skip("callers refuse an even number")
    g = torch.Generator().manual_seed(0)
    v, w = torch.randn(2, 3, 150, 5, generator=g), torch.randn(3, taps, generator=g)
    leaves = [x.double().requires_grad_() for x in (v, w)]
    padded = torch.nn.functional.pad(leaves[0], (0, 0, taps // 2, taps - 1 - taps // 2))
    expected = torch.nn.functional.conv2d(padded, leaves[1][:, None, :, None], groups=3)
    out, of_v, of_w = torch.empty_like(v), torch.empty_like(v), v.new_empty(2, 3, 1, taps)
    native.run_landmarks("landmarks_forward", v=v, w=native.as_rows(w, v), out=out)
    grad = torch.randn(v.shape, generator=g)
    native.run_landmarks("convolution_backward", grad=grad, v=v, w=native.as_rows(w, v), of_v=of_v, of_w=of_w)
    found = torch.autograd.grad(expected, leaves, grad.double())
    check_like([out, of_v, of_w.sum(dim=(0, 2))], [expected, *found], 1e-5)
