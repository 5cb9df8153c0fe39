import pytest
import torch

from nystrom import build_attention
from nystrom.attention.methods.informer import _sample, informer_attention


def draw(seed, n, s=None, *, b=2, h=3, d=6):
    g = torch.Generator().manual_seed(seed)
    s = n if s is None else s
    return [torch.randn(b, h, t, d, generator=g, dtype=torch.float64) for t in (n, s, s)]


def exact_queries(out, q, k, v):
    """Which queries hold exact attention; the others must hold the mean."""
    exact = torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, dim=-1) @ v
    is_exact = torch.isclose(out, exact, rtol=1e-10, atol=1e-12).all(-1)
    lazy = torch.isclose(out, v.mean(dim=2, keepdim=True), rtol=1e-10, atol=1e-12).all(-1)
    assert (is_exact | lazy).all()
    return is_exact


@pytest.mark.parametrize("factor", [1, 3])
def test_with_every_key_sampled_it_is_that_of_transformers(factor, monkeypatch):
    peer = pytest.importorskip("transformers.models.informer.modeling_informer")
    n, h, d = 40, 3, 6
    theirs = peer.InformerProbSparseAttention(h * d, h, sampling_factor=factor).double().eval()
    # They draw keys with replacement; here each comes once.
    monkeypatch.setattr(peer.torch, "randint", lambda low, high, size: torch.arange(high))
    x = torch.randn(2, n, h * d, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    q, k, v = (f(x).unflatten(-1, (h, d)).transpose(1, 2) for f in (theirs.q_proj, theirs.k_proj, theirs.v_proj))
    # ceil(ln 41) = 4
    out = informer_attention(q, k, v, num_queries=4 * factor, num_samples=n)
    torch.testing.assert_close(theirs.out_proj(out.transpose(1, 2).flatten(2)), theirs(x)[0], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("n", "s"), [(40, 40), (40, 9)])
def test_the_queries_of_largest_measure_are_exact_and_the_rest_the_mean(n, s):
    q, k, v = draw(1, n, s)
    scores = q @ k.mT / 6**0.5
    measure = scores.amax(-1) - scores.mean(-1)
    expected = torch.zeros(2, 3, n, dtype=torch.bool).scatter(2, measure.topk(7).indices, True)
    out = informer_attention(q, k, v, num_queries=7, num_samples=s)
    torch.testing.assert_close(exact_queries(out, q, k, v), expected)


def test_the_sample_is_one_real_key_of_each_segment():
    keep = torch.rand(3, 50, generator=torch.Generator().manual_seed(2)) < 0.5
    draws = torch.rand(6, generator=torch.Generator().manual_seed(3))
    positions = _sample(torch.zeros(3, 1, 50, 1), keep, draws)
    for i in range(3):
        real = keep[i].nonzero()[:, 0]
        rank = [real.tolist().index(p) for p in positions[i].tolist()]
        edges = [len(real) * j / 6 for j in range(7)]
        assert all(low - 1 < r < high for r, low, high in zip(rank, edges, edges[1:], strict=False))


def test_fewer_real_keys_than_samples_are_all_sampled():
    keep = torch.zeros(2, 30, dtype=torch.bool)
    keep[0, [3, 11, 12]] = True
    positions = _sample(torch.zeros(2, 1, 30, 1), keep, torch.rand(8))
    assert set(positions[0].tolist()) == {3, 11, 12}


@pytest.mark.parametrize("before", [0, 3, 17])
def test_equal_measures_are_settled_by_rank(before):
    # Small whole numbers: every score is exact, so that equal queries have equal measures.
    g = torch.Generator().manual_seed(4)
    k, v = (torch.randint(-3, 4, (1, 1, 24, 4), generator=g).double() for _ in range(2))
    q = k[:, :, :1].expand(-1, -1, 24, -1)
    q, k, v = (torch.nn.functional.pad(x, (0, 0, before, 5)) for x in (q, k, v))
    keep = torch.nn.functional.pad(torch.ones(1, 24, dtype=torch.bool), (before, 5))
    out = informer_attention(q, k, v, num_queries=6, num_samples=4, keep=keep, scale=1.0)
    out, q, k, v = (x[:, :, before : before + 24] for x in (out, q, k, v))
    torch.testing.assert_close(exact_queries(out, 2 * q, k, v)[0, 0].nonzero()[:, 0], torch.arange(6))


def test_lazy_queries_have_no_gradient_and_selected_ones_do():
    q, k, v = (x.requires_grad_() for x in draw(5, 40))
    out = informer_attention(q, k, v, num_queries=7, num_samples=11)
    out.square().sum().backward()
    torch.testing.assert_close(q.grad.abs().sum(-1) > 0, exact_queries(out, q, k, v))


def test_no_query_by_sample_matrix_is_stored():
    attend = build_attention("informer", num_heads=1, head_dim=2, num_queries=8, num_samples=256)
    q, k, v = (torch.randn(1, 1, 4096, 2) for _ in range(3))
    with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
        attend(q, k, v)
    largest = max(event.cpu_memory_usage for event in profile.events())
    # Blocks of 16 keys in float32; 256 of them would be 4 MiB.
    assert largest <= 16 * 4096 * 4 * 2


@pytest.mark.refuses
@pytest.mark.parametrize("option", ["num_queries", "num_samples"])
def test_bad_options_raise(option):
    with pytest.raises(ValueError, match=f"{option} is 0; expected a whole number of at least 1"):
        informer_attention(*draw(0, 8), **{option: 0})


@pytest.mark.parametrize("case", ["one sample", "equal keys"])
def test_where_no_query_stands_out_the_first_are_exact(case):
    q, k, v = draw(4, 40)
    if case == "equal keys":
        # All except a few, which are in no sample: it takes evenly spread keys.
        k[:, :, 1:] = k[:, :, 1:2]
    out = informer_attention(q, k, v, num_queries=5, num_samples=1 if case == "one sample" else 3)
    assert torch.equal(out[:, :, 5:], v.mean(dim=2, keepdim=True).expand(-1, -1, 35, -1))
    torch.testing.assert_close(out[:, :, :5], torch.softmax(q[:, :, :5] @ k.mT / 6**0.5, dim=-1) @ v)
