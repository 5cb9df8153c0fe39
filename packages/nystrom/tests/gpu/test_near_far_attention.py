"""The kernels of near_far agree with its dense matrix in plain torch; without a GPU they run in the interpreter."""

import pytest
import torch

pytest.importorskip("triton")

from nystrom import near_far_attention, near_far_rows, reference
from nystrom.attention.options import NearFarOptions
from nystrom.attention.parts.clusters import choose
from nystrom.gpu.near_far import near_far_attention as on_gpu
from nystrom.gpu.near_far.near_far_attention import near_far

# Kernels in the interpreter.
pytestmark = pytest.mark.long

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = {"block_size": 8, "reach": 3, "num_heavy": 3, "num_clusters": 4, "exact_up_to": 0}
# float64 rounding of sums over some dozens of tokens
CLOSE = {"rtol": 1e-10, "atol": 1e-11}


def draw(*shape, dtype=torch.float64, seed=0, size=1.0):
    g = torch.Generator().manual_seed(seed)
    return (size * torch.randn(shape, generator=g, dtype=torch.float64)).to(DEVICE, dtype).requires_grad_()


def draw_qkv(n, s=None, *, b=2, h=1, d=5, e=3, **more):
    s = n if s is None else s
    return [draw(b, h, t, w, seed=i, **more) for i, (t, w) in enumerate(((n, d), (s, d), (s, e)))]


def holes(n):
    """A mask with padding at both ends and holes, and one that begins late."""
    keep = torch.ones(2, n, dtype=torch.bool)
    keep[0, :3] = keep[0, n - 4 :] = keep[0, n // 2 : n // 2 + 2] = keep[1, : n // 3] = False
    return keep.to(DEVICE)


def by_kernels(*inputs, **options):
    return near_far_attention(*inputs, **options, backend="triton")


def dense(q, k, v, **options):
    """The matrix of the method, n x s numbers, times the values."""
    return near_far_rows(q, k, torch.arange(q.shape[2], device=q.device), **options) @ v


def assert_same(inputs, **options):
    """Outputs and gradients of the kernels are those of the dense matrix."""
    out, expected = (attend(*inputs, **options) for attend in (by_kernels, dense))
    torch.testing.assert_close(out, expected, **CLOSE)
    grad = draw(*out.shape, seed=9)
    found, wanted = (torch.autograd.grad(x, inputs, grad) for x in (out, expected))
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, **CLOSE)


@pytest.mark.parametrize(
    ("n", "masked", "change"),
    [
        pytest.param(27, False, {}, id="open"),
        pytest.param(43, True, {}, id="masked"),
        pytest.param(
            25, True, {"reach": 11, "num_heavy": 0, "num_clusters": 2, "exact_up_to": 0}, id="reach-of-several-blocks"
        ),
        pytest.param(30, False, {"reach": 0, "num_clusters": 1, "exact_up_to": 0, "scale": 0.9}, id="no-reach"),
        # more than a tile of clusters, of heavy keys and of tokens of a window
        pytest.param(
            170, True, {"block_size": 24, "num_heavy": 70, "num_clusters": 66, "exact_up_to": 0}, id="several-tiles"
        ),
        # more than a tile of queries
        pytest.param(150, False, {"block_size": 70}, id="large-blocks"),
        pytest.param(9, False, {"block_size": 1, "reach": 1}, id="a-query-a-block"),
    ],
)
def test_outputs_and_gradients_are_those_of_the_dense_matrix(n, masked, change):
    assert_same(draw_qkv(n, b=2 if masked else 1), keep=holes(n) if masked else None, **{**SMALL, **change})


def test_heads_and_wide_values_are_the_dense_matrix():
    assert_same(draw_qkv(27, b=1, h=3, d=3, e=20), **SMALL)


@pytest.mark.parametrize("masked", [False, True])
def test_other_queries_see_heavy_keys_and_clusters(masked):
    key_keep, query_keep = (holes(23), holes(70)) if masked else (torch.ones_like(holes(23)), None)
    assert_same(draw_qkv(70, 23), key_keep=key_keep, query_keep=query_keep, **SMALL)


def test_queries_with_a_mask_of_their_own_are_other_tokens():
    keep = holes(23)
    assert_same(draw_qkv(23), key_keep=keep, query_keep=keep, **SMALL)


def test_a_sequence_of_heavy_keys_alone_and_one_without_any_key():
    keep = torch.zeros(2, 20, dtype=torch.bool, device=DEVICE)
    keep[0, 9:11] = True
    assert_same(draw_qkv(20), keep=keep, **SMALL)


def test_sums_over_spans_of_tokens_are_joined():
    assert_same(draw_qkv(300, b=1), **{**SMALL, "block_size": 40, "num_clusters": 2})


def test_projections_are_read_in_their_layout():
    leaf = draw(2, 27, 3, 2, 8)
    q, k, v = (x.transpose(1, 2) for x in leaf.unbind(2))
    out = by_kernels(q, k, v, **SMALL)
    # Merging the heads of the output copies nothing.
    assert out.transpose(1, 2).is_contiguous()
    expected = dense(q, k, v, **SMALL)
    torch.testing.assert_close(out, expected, **CLOSE)
    grads = [torch.autograd.grad(x.square().sum(), leaf)[0] for x in (out, expected)]
    torch.testing.assert_close(*grads, **CLOSE)


SIZES = ("num_clusters", "block_size", "reach")


def assert_near(inputs, options):
    """Errors against float64 are at most twice those of the plain formula in the inputs' dtype, from one choice."""
    q, k = (x.detach().float() for x in inputs[:2])
    chosen = choose(q, k, None, None, NearFarOptions(**options))
    grad = draw(*inputs[2].shape, dtype=inputs[2].dtype, seed=9)
    sizes = dict(zip(SIZES, (options[name] for name in SIZES), strict=True))

    def by_kernels(q, k, v):
        return near_far(q, k, v, *chosen, **sizes, keep=None, scale=q.shape[-1] ** -0.5)

    def by_formula(*x):
        places = torch.arange(q.shape[2], device=DEVICE)
        near = reference.near_keys(places, places, block_size=sizes["block_size"], reach=sizes["reach"])

        def formula(q, k, v, b, h, _):
            given = {"cluster": chosen.cluster[b, h], "num_clusters": sizes["num_clusters"], "near": near}
            return reference.near_far(q, k, v, **given)

        return reference.by_sequence(formula, *x)

    def results(attend, inputs):
        out = attend(*inputs)
        return [out, *torch.autograd.grad(out, inputs, grad.to(out.dtype))]

    wanted = results(by_formula, [x.detach().double().requires_grad_() for x in inputs])
    theirs, mine = results(by_formula, inputs), results(by_kernels, inputs)
    for name, right, other, own in zip(("out", "q", "k", "v"), wanted, theirs, mine, strict=True):
        error, allowed = ((x.double() - right).norm() / right.norm() for x in (own, other))
        assert own.dtype == inputs[0].dtype
        assert own.isfinite().all()
        assert own.dtype == torch.float16 or not allowed.isnan()
        # Three tf32 products leave out the product of both remainders. In float16 the plain formula may overflow.
        lost = 2**-22 if own.dtype == torch.float32 else 0.0
        assert allowed.isnan() or error <= 2 * allowed + lost, f"{name}: {error:.2e}, the plain formula {allowed:.2e}"


@pytest.mark.parametrize(
    ("dtype", "d", "size"),
    [
        (torch.float32, 16, 1.0),
        (torch.bfloat16, 32, 1.0),
        (torch.bfloat16, 16, 2.0),
        (torch.float16, 16, 1.0),
    ],
)
def test_errors_are_at_most_twice_those_of_the_plain_formula(dtype, d, size):
    options = {**SMALL, "block_size": 16, "num_clusters": 8}
    assert_near(draw_qkv(96, b=1, d=d, e=d, dtype=dtype, size=size), options)


def test_the_same_inputs_give_the_same_bits():
    inputs, keep = draw_qkv(27, dtype=torch.float32), holes(27)
    results = []
    for _ in range(2):
        out = by_kernels(*inputs, keep=keep, **SMALL)
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    for first, again in zip(*results, strict=True):
        torch.testing.assert_close(first, again, rtol=0, atol=0)


@pytest.mark.parametrize("masks", ["none", "keep", "cross"])
def test_one_program_gives_the_bits_of_the_choice_and_then_the_attention(masks, monkeypatch):
    inputs = draw_qkv(43, 37 if masks == "cross" else 43, dtype=torch.float32)
    query_keep, key_keep = (holes(x.shape[2]) for x in inputs[:2])
    given = {"none": {}, "keep": {"keep": query_keep}, "cross": {"key_keep": key_keep, "query_keep": query_keep}}
    on_gpu.whole_program.cache_clear()
    results = []
    for is_whole in (True, False):
        if not is_whole:
            monkeypatch.setattr(on_gpu, "can_choose_and_attend", lambda: False)
        out = by_kernels(*inputs, **given[masks], **SMALL)
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
        with torch.no_grad():
            results.append([by_kernels(*inputs, **given[masks], **SMALL), *results[-1][1:]])
        assert on_gpu.whole_program.cache_info().misses == 1
    for others in results[1:]:
        assert all(map(torch.equal, others, results[0]))


def test_between_the_passes_no_key_is_kept_twice():
    n, m, d, block = 96, 4, 8, 16
    inputs, kept = draw_qkv(n, b=1, d=d, e=d), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        out = by_kernels(*inputs, block_size=block, reach=3, num_heavy=3, num_clusters=m, exact_up_to=0)
    own = {x.data_ptr() for x in (*inputs, out)}
    assert own <= {x.data_ptr() for x in kept}
    others = {x.data_ptr(): x.numel() for x in kept if x.data_ptr() not in own}
    # The choice: a number for each token and two for each heavy key. And one tensor of five parts that begin at
    # multiples of 128: two numbers for each token, one for each cluster and block, two rows and a number a cluster.
    assert sum(others.values()) <= 2 * 3 + n + 5 * 127 + 2 * n + (n // block + 2) * m + 2 * m * d + m


def squares(q, k, v, backend="triton"):
    return near_far_attention(q, k, v, **SMALL, backend=backend).square().sum()


def grad_of_grad(q, k, v):
    (first,) = torch.autograd.grad(squares(q, k, v), q, create_graph=True)
    torch.autograd.grad(first.sum(), q)


GONE = r"backend 'triton' has no .*derivative.*a method with second derivatives"
WAYS = {
    "grad of grad": grad_of_grad,
    "func": lambda q, k, v: torch.func.grad(lambda q: torch.func.grad(squares)(q, k, v).sum())(q),
    "forward mode": lambda q, k, v: torch.func.jvp(lambda q: squares(q, k, v), (q,), (q.detach(),)),
}


@pytest.mark.parametrize("way", WAYS)
def test_derivatives_that_are_not_there_raise_by_every_way(way):
    with pytest.raises(NotImplementedError, match=GONE):
        WAYS[way](*draw_qkv(12, b=1))


def test_what_vjp_returns_gives_gradients_where_torch_records_none():
    inputs = [x.detach() for x in draw_qkv(12, b=1)]
    loss, back = torch.func.vjp(squares, *inputs)
    leaves = [x.clone().requires_grad_() for x in inputs]
    expected = torch.autograd.grad(squares(*leaves), leaves)
    with torch.no_grad():
        found = back(torch.ones_like(loss))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


# torch maps a step of the choice of clusters one by one.
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_gradients_of_each_sequence_by_vmap():
    inputs = [x.detach() for x in draw_qkv(12)]

    def loss(*x):
        # A batch of one.
        return squares(*(each[None] for each in x))

    mine = torch.func.vmap(torch.func.grad(loss, (0, 1, 2)))(*inputs)
    for i in range(2):
        alone = [x[i : i + 1].clone().requires_grad_() for x in inputs]
        theirs = torch.autograd.grad(squares(*alone, backend="torch"), alone)
        for x, y in zip(mine, theirs, strict=True):
            torch.testing.assert_close(x[i : i + 1], y, **CLOSE)


@pytest.mark.refuses
@pytest.mark.parametrize(
    ("d", "e", "dtype", "message"),
    [
        (129, 8, torch.float32, "q has head width 129; expected at most 128 in near_far.*backend='torch'"),
        (8, 300, torch.float32, "v has head width 300"),
        (65, 8, torch.float64, "q has head width 65; expected at most 64 in torch.float64"),
    ],
)
def test_inputs_that_no_kernel_is_made_for_raise(d, e, dtype, message):
    with pytest.raises(ValueError, match=message):
        by_kernels(*draw_qkv(12, b=1, d=d, e=e, dtype=dtype), **SMALL)


FULL = {"block_size": 64, "reach": 8, "num_heavy": 48, "num_clusters": 64, "exact_up_to": 0}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("d", "e"), [(16, 16), (64, 64), (128, 128), (64, 128), (100, 40)])
@pytest.mark.parametrize(
    "change", [{}, {"block_size": 128, "reach": 40, "num_clusters": 200, "exact_up_to": 0}], ids=str
)
def test_errors_are_at_most_twice_those_of_the_plain_formula_at_full_size(dtype, d, e, change):
    for size in (0.3, 1.0, 3.0):
        assert_near(draw_qkv(4096, b=2, h=2, d=d, e=e, dtype=dtype, size=size), {**FULL, **change})


@pytest.mark.gpu
@pytest.mark.parametrize("s", [5000, 3001])
def test_masked_outputs_and_gradients_are_those_of_torch_at_full_size(s):
    keep = torch.rand(3, s, generator=torch.Generator("cuda").manual_seed(4), device="cuda") < 0.9
    keep[0, 400:] = keep[1, :1000] = False
    inputs = draw_qkv(s, b=3, h=2, d=64, e=64)
    results = []
    for backend in ("torch", "triton"):
        out = near_far_attention(*inputs, keep=keep, **FULL, backend=backend)
        results.append([out, *torch.autograd.grad(out, inputs, draw(*out.shape, seed=9))])
    for x, y in zip(*results, strict=True):
        # float64 rounding of sums over some thousands of tokens
        torch.testing.assert_close(x, y, rtol=1e-8, atol=1e-9)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [129, 4097, 131_072])
def test_any_length_on_a_gpu(n):
    inputs = draw_qkv(n, b=1, h=2, d=64, e=64, dtype=torch.bfloat16)
    out = by_kernels(*inputs, **FULL)
    out.float().square().mean().backward()
    assert all(x.isfinite().all() for x in (out, *(x.grad for x in inputs)))


@pytest.mark.gpu
def test_one_choice_gives_the_same_bits_on_a_gpu():
    inputs = draw_qkv(10_000, b=2, h=8, d=64, e=64, dtype=torch.bfloat16)
    chosen = choose(*(x.detach().float() for x in inputs[:2]), None, None, NearFarOptions(**FULL))
    grad, runs = draw(2, 8, 10_000, 64, dtype=torch.bfloat16, seed=9), []
    for _ in range(3):
        out = near_far(*inputs, *chosen, num_clusters=64, block_size=64, reach=8, keep=None, scale=0.125)
        runs.append([out, *torch.autograd.grad(out, inputs, grad)])
    for run in runs[1:]:
        for first, again in zip(runs[0], run, strict=True):
            torch.testing.assert_close(first, again, rtol=0, atol=0)


@pytest.mark.gpu
def test_inductor_gives_the_same():
    inputs = draw_qkv(3000, b=2, h=4, d=64, e=64, dtype=torch.float32)
    compiled = torch.compile(lambda *x: by_kernels(*x, **FULL), fullgraph=True)
    # A token of two clusters that are equally near may change from one to the other.
    torch.testing.assert_close(compiled(*inputs), by_kernels(*inputs, **FULL), rtol=0, atol=0.02)
