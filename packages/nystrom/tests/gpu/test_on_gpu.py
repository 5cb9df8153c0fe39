"""The kernels at full size, on a GPU: `pytest -m gpu tests/gpu`."""

import pytest
import torch

from nystrom import nystrom_attention, skyformer_attention

pytest.importorskip("triton")

from nystrom.gpu.program import Program

pytestmark = pytest.mark.gpu
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def draw(*shape, dtype, seed, size=1.0):
    g = torch.Generator("cuda").manual_seed(seed)
    return (size * torch.randn(shape, generator=g, device="cuda")).to(dtype).requires_grad_()


def results(attend, inputs, grad):
    out = attend(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad.to(out.dtype))]


def assert_near(attend, inputs, grad, plain):
    """Errors against float64 are at most twice those of `plain` in the inputs' dtype."""
    exact = [x.detach().double().requires_grad_() for x in inputs]
    wanted = results(lambda *x: attend(*x, backend="torch"), exact, grad)
    theirs = results(plain, inputs, grad)
    mine = results(lambda *x: attend(*x, backend="triton"), inputs, grad)
    for name, right, other, own in zip(("out", "q", "k", "v"), wanted, theirs, mine, strict=True):
        error, allowed = ((x.double() - right).norm() / right.norm() for x in (own, other))
        assert own.isfinite().all()
        assert own.dtype == torch.float16 or not allowed.isnan()
        # Three tf32 products leave out the product of both remainders. In float16 the plain formula may overflow.
        lost = 2**-22 if own.dtype == torch.float32 else 0.0
        assert allowed.isnan() or error <= 2 * allowed + lost, f"{name}: {error:.2e}, the plain formula {allowed:.2e}"


def plain_nystrom(m):
    def attend(q, k, v):
        scale = q.shape[-1] ** -0.5
        q_landmarks, k_landmarks = (x.unflatten(2, (m, -1)).mean(3) for x in (q, k))
        left, a, right = (
            torch.softmax(scale * x @ y.mT, dim=-1)
            for x, y in ((q, k_landmarks), (q_landmarks, k_landmarks), (q_landmarks, k))
        )
        z = a.mT / (a.sum(-2).amax(-1) * a.sum(-1).amax(-1))[..., None, None]
        eye = torch.eye(m, dtype=q.dtype, device=q.device)
        for _ in range(6):
            az = a @ z
            z = 0.25 * z @ (13 * eye - az @ (15 * eye - az @ (7 * eye - az)))
        return left @ z @ (right @ v)

    return attend


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("m", "d"), [(1, 16), (16, 64), (64, 64), (64, 128), (128, 64), (256, 128), (64, 256), (256, 256)]
)
@pytest.mark.parametrize("size", [0.3, 1.0, 3.0])
def test_errors_are_at_most_twice_those_of_the_plain_formula(dtype, m, d, size):
    inputs = [draw(2, 3, 4096, d, dtype=dtype, seed=i, size=size) for i in range(3)]
    grad = draw(2, 3, 4096, d, dtype=dtype, seed=9)
    assert_near(lambda *x, **o: nystrom_attention(*x, num_landmarks=m, **o), inputs, grad, plain_nystrom(m))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("attend", "m"), [(nystrom_attention, 64), (nystrom_attention, 100), (skyformer_attention, 128)]
)
@pytest.mark.parametrize(("n", "s"), [(5000, 5000), (3001, 7013)])
def test_masked_results_are_near_the_reference(dtype, attend, m, n, s):
    g = torch.Generator("cuda").manual_seed(4)
    keep, query_keep = (torch.rand(3, t, generator=g, device="cuda") < 0.7 for t in (s, n))
    keep[0, 40:] = query_keep[1, 30:] = False
    inputs = [draw(3, 2, t, 64, dtype=dtype, seed=i) for i, t in enumerate((n, s, s))]
    grad = draw(3, 2, n, 64, dtype=dtype, seed=9)
    masks = {"key_keep": keep, "query_keep": query_keep}
    exact = [x.detach().double().requires_grad_() for x in inputs]
    wanted = results(lambda *x: attend(*x, num_landmarks=m, **masks, backend="torch"), exact, grad)
    theirs = results(lambda *x: attend(*x, num_landmarks=m, **masks, backend="torch"), inputs, grad)
    mine = results(lambda *x: attend(*x, num_landmarks=m, **masks, backend="triton"), inputs, grad)
    for right, other, own in zip(wanted, theirs, mine, strict=True):
        error, allowed = ((x.double() - right).norm() / right.norm() for x in (own, other))
        # The torch path also sums, and computes the m x m part, in float32: a few times its errors are enough room.
        assert error <= 4 * allowed + 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("masked", [False, True])
def test_the_skip_is_near_the_reference(dtype, masked):
    q, k, v = (draw(2, 4, 4100, 64, dtype=dtype, seed=i) for i in range(3))
    weight = draw(4, 1, 33, 1, dtype=dtype, seed=5, size=0.2)
    keep = torch.arange(4100, device="cuda") < torch.tensor([[4100], [2050]], device="cuda") if masked else None
    inputs, grad = [q, k, v, weight], draw(2, 4, 4100, 64, dtype=dtype, seed=9)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    attend = {
        backend: lambda q, k, v, w, backend=backend: nystrom_attention(q, k, v, keep=keep, skip=w, backend=backend)
        for backend in ("torch", "triton")
    }
    wanted, theirs = (results(attend["torch"], x, grad) for x in (exact, inputs))
    for right, other, own in zip(wanted, theirs, results(attend["triton"], inputs, grad), strict=True):
        error, allowed = ((x.double() - right).norm() / right.norm() for x in (own, other))
        assert error <= 4 * allowed + 1e-6


@pytest.mark.parametrize("n", [1, 64, 65, 131_072])
def test_any_length(n):
    inputs = [draw(1, 2, n, 64, dtype=torch.bfloat16, seed=i) for i in range(3)]
    out = nystrom_attention(*inputs, backend="triton")
    out.float().square().mean().backward()
    assert out.isfinite().all()
    assert all(x.grad.isfinite().all() for x in inputs)


@pytest.mark.parametrize("d", [64, 128])
def test_extra_memory_is_at_most_a_twentieth(d):
    q, k, v = (draw(4, 16, 16_384, d, dtype=torch.bfloat16, seed=i).detach() for i in range(3))
    nystrom_attention(q, k, v, backend="triton")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = nystrom_attention(q, k, v, backend="triton")
    torch.cuda.synchronize()
    own = 4 * out.numel() * out.element_size()
    assert torch.cuda.max_memory_allocated() - before - out.numel() * out.element_size() <= 0.05 * own


def test_the_same_inputs_give_the_same_bits():
    inputs = [draw(2, 8, 10_000, 64, dtype=torch.bfloat16, seed=i) for i in range(3)]
    grad = draw(2, 8, 10_000, 64, dtype=torch.bfloat16, seed=9)
    runs = [results(lambda *x: nystrom_attention(*x, backend="triton"), inputs, grad) for _ in range(3)]
    for run in runs[1:]:
        for first, again in zip(runs[0], run, strict=True):
            torch.testing.assert_close(first, again, rtol=0, atol=0)


def test_inductor_gives_the_same():
    inputs = [draw(2, 4, 3000, 64, dtype=torch.bfloat16, seed=i) for i in range(3)]
    attend = lambda *x: nystrom_attention(*x, backend="triton")  # noqa: E731
    compiled = torch.compile(attend, fullgraph=True)
    grad = torch.ones_like(inputs[0])
    for first, again in zip(results(attend, inputs, grad), results(compiled, inputs, grad), strict=True):
        torch.testing.assert_close(first, again, rtol=0, atol=0)


def test_tensors_on_two_devices_raise():
    q, k, v = (draw(1, 1, 300, 16, dtype=torch.float32, seed=i) for i in range(3))
    with pytest.raises(ValueError, match=r"k is on cpu but q is on cuda"):
        nystrom_attention(q, k.cpu(), v, backend="triton")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_auto_means_the_kernels_where_they_were_measured(dtype, monkeypatch):
    inputs = [draw(1, 2, 2048, 64, dtype=dtype, seed=i).detach() for i in range(3)]
    measured = torch.cuda.get_device_capability() == (9, 0) and dtype == torch.bfloat16
    wanted = nystrom_attention(*inputs, backend="triton" if measured else "torch")
    ran, run = [], Program.__call__
    monkeypatch.setattr(Program, "__call__", lambda *given: ran.append(given) or run(*given))
    found = nystrom_attention(*inputs)
    assert bool(ran) == measured
    # Kernels give the same bits each time; torch's operators in float32 need not, and differ by rounding, which an
    # inverse of some hundred condition amplifies.
    assert (found - wanted).norm() <= (0 if measured else 1e-4) * wanted.norm()
