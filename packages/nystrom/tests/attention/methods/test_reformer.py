import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nystrom import build_attention, reference
from nystrom.attention.methods.reformer import attend_by_rotations, reformer_attention
from nystrom.attention.options import ReformerOptions


def draw(seed, n, *, b=2, h=2, d=6, e=5):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(b, h, n, w, generator=g, dtype=torch.float64) for w in (d, d, e)]


def draw_rotations(seed, rounds, buckets, *, h=2, d=6):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(rounds, h, d, buckets // 2, generator=g, dtype=torch.float64)


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(("n", "rounds", "m", "buckets"), [(30, 1, 4, 6), (41, 3, 5, 4), (26, 2, 64, 8)])
def test_it_is_softmax_over_the_union_of_the_rounds(across, shared, n, rounds, m, buckets):
    q, k, v = draw(0, n)
    rotations = draw_rotations(1, rounds, buckets)
    options = ReformerOptions(
        num_hashes=rounds, chunk_size=m, num_buckets=buckets, shared_qk=shared, across_buckets=across
    )

    def formula(q, k, v, b, h, places):
        return reference.reformer(
            q, k, v, rotations=rotations[:, h], chunk_size=m, shared_qk=shared, across_buckets=across
        )

    expected = reference.by_sequence(formula, q, k, v)
    # float64 rounding of a softmax
    torch.testing.assert_close(attend_by_rotations(q, k, v, None, rotations, options), expected, rtol=1e-10, atol=1e-12)
    # A token alone in its bucket is part of the test.
    assert (expected == v).all(dim=-1).any() or across or rounds > 1 or n <= m


def test_one_round_is_that_of_transformers_after_the_first_chunk():
    peer = pytest.importorskip("transformers.models.reformer.modeling_reformer")
    transformers = pytest.importorskip("transformers")
    n, h, d, m, buckets = 48, 2, 6, 4, 6
    config = transformers.ReformerConfig(
        hidden_size=h * d,
        num_attention_heads=h,
        attention_head_size=d,
        attn_layers=["lsh"],
        lsh_attn_chunk_length=m,
        num_hashes=1,
        num_buckets=buckets,
        hash_seed=0,
        is_decoder=False,
        lsh_attention_probs_dropout_prob=0.0,
    )
    theirs = peer.LSHSelfAttention(config).double().eval()
    x = torch.randn(2, n, h * d, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    q, v = (f(x).unflatten(-1, (h, d)).transpose(1, 2) for f in (theirs.query_key, theirs.value))
    state = torch.get_rng_state()
    torch.manual_seed(0)
    rotations = torch.randn(h, d, 1, buckets // 2, dtype=torch.float64).permute(2, 0, 1, 3)
    out = attend_by_rotations(
        q, q, v, None, rotations, ReformerOptions(num_hashes=1, chunk_size=m, num_buckets=buckets, across_buckets=True)
    )
    expected = theirs(x).hidden_states.unflatten(-1, (h, d)).transpose(1, 2)
    torch.set_rng_state(state)
    # Theirs lets the first chunk look back at the last one.
    places = torch.stack([reference.hashed(q[i, j], rotations[0, j])[1] for i in range(2) for j in range(h)])
    later = (places >= m).unflatten(0, (2, h))
    assert later.sum() == 2 * h * (n - m)
    # They add 1e-6 to the mean square of a key, which here is near 0.1 to 1.
    torch.testing.assert_close(out[later], expected[later], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rounds", [1, 3])
def test_one_bucket_and_one_chunk_of_queries_and_keys_are_softmax(rounds):
    q, k, v = draw(3, 20)
    out = reformer_attention(q, k, v, num_hashes=rounds, num_buckets=1, chunk_size=20, shared_qk=False)
    expected = torch.softmax(q @ k.mT / 6**0.5, dim=-1) @ v
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)


def test_queries_as_keys_sorted_separately_reach_what_shared_ones_do():
    q, _, v = draw(4, 60)
    rotations = draw_rotations(5, 2, 6)
    x = q[0, 0]
    for rotation in rotations[:, 0]:
        bucket, place = reference.hashed(x, rotation)
        behind = (place // 4)[:, None] - place // 4
        wanted = ((behind == 0) | (behind == 1)) & (bucket[:, None] == bucket)
        assert torch.equal(reference.meets_in_round(x, x, rotation, 4, False), wanted)
    # On a sphere the keys are the queries, except for the token itself, which has one value here.
    q = torch.nn.functional.normalize(q, dim=-1) * 6**0.5
    v = torch.nn.functional.pad(torch.zeros_like(v), (0, 1), value=1.0)
    apart = attend_by_rotations(
        q, q, v, None, rotations, ReformerOptions(num_hashes=2, chunk_size=4, num_buckets=6, shared_qk=False)
    )
    torch.testing.assert_close(apart, v, rtol=0, atol=1e-12)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("across", [True, False])
def test_gradients_over_several_parts_are_those_of_the_plain_forward(shared, across, monkeypatch):
    from nystrom.attention.methods import reformer

    rotations = draw_rotations(6, 3, 4)
    options = ReformerOptions(num_hashes=3, chunk_size=4, num_buckets=4, shared_qk=shared, across_buckets=across)
    keep = torch.rand(2, 50, generator=torch.Generator().manual_seed(7)) < 0.8
    results = []
    for plain in (False, True):
        inputs = [x.requires_grad_() for x in draw(8, 50)]
        if plain:
            monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
        else:
            # Three chunks at a time
            monkeypatch.setitem(reformer.SCORES_AT_A_TIME, "cpu", 3 * 4 * 8)
        out = attend_by_rotations(*inputs, keep, rotations, options)
        out.square().sum().backward()
        results.append([out.detach(), *(x.grad for x in inputs)])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)


class LargestTensor(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.untyped_storage().nbytes() // x.element_size())
        return out


def test_scores_of_a_long_sequence_are_never_all_there():
    n = 32768
    inputs = [torch.randn(1, 1, n, 2, requires_grad=True) for _ in range(3)]
    attend = build_attention("reformer", num_heads=1, head_dim=2, num_buckets=512).eval()
    with LargestTensor() as largest:
        attend(*inputs).sum().backward()
    # All scores of a round would be 128 n.
    assert largest.numel <= 2**20 == 32 * n


def test_opposite_tokens_are_in_opposite_buckets():
    from nystrom.attention.parts.lsh import hash_buckets

    x, _, _ = draw(9, 50)
    rotation = draw_rotations(10, 1, 8)[0]
    buckets = hash_buckets(x, rotation, None)
    assert buckets.min() == 0
    assert buckets.max() == 7
    assert torch.equal(hash_buckets(-x, rotation, None), (buckets + 4) % 8)
    assert torch.equal(hash_buckets(30 * x, rotation, None), buckets)


def test_rotations_without_a_draw_are_gaussian():
    from nystrom.attention.parts.lsh import even_rotations

    x = even_rotations((2, 4, 32, 16), torch.device("cpu"))
    # Moments of 4096 normal numbers: deviations of 1/64, sqrt(2)/64 and, of a product of two, 1/64.
    assert abs(x.mean()) < 3 / 64
    assert abs(x.var() - 1) < 3 * 2**0.5 / 64
    for rows in (x[0] * x[1], x[:, 1:] * x[:, :-1], x[..., 1:, :] * x[..., :-1, :], x[..., 1:] * x[..., :-1]):
        assert abs(rows.mean()) < 4 / rows.numel() ** 0.5


def test_near_tokens_share_a_bucket_and_far_ones_do_not():
    from nystrom.attention.parts.lsh import even_rotations, hash_buckets

    g = torch.Generator().manual_seed(11)
    x = torch.randn(1, 2, 500, 32, generator=g)
    rotation = even_rotations((1, 2, 32, 16), x.device)[0]
    same = [
        (hash_buckets(x, rotation, None) == hash_buckets(x + size * torch.randn(x.shape, generator=g), rotation, None))
        for size in (0.05, 0.5, 50.0)
    ]
    near, middle, far = (agree.double().mean() for agree in same)
    assert near > 0.85 > middle > 2 * far
    # Unrelated tokens share one of 32 buckets: 1000 pairs, three deviations.
    assert abs(far - 1 / 32) < 3 * (1 / 32 / 1000) ** 0.5


@pytest.mark.refuses
def test_inputs_that_do_not_fit_raise_by_name():
    q, k, v = draw(0, 9)
    keep = torch.ones(2, 9, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"q holds 8 tokens and k holds 9, but reformer is self-attention.*'nystrom'"):
        reformer_attention(q[:, :, :8], k, v)
    for mask in (None, keep.clone()):
        with pytest.raises(ValueError, match="query_keep cannot be honoured: reformer_attention is self-attention"):
            reformer_attention(q, k, v, keep=mask, query_keep=keep)
    for option, value, message in (
        ("num_buckets", 5, "num_buckets is 5; expected 1 or an even number"),
        ("num_buckets", 0, "num_buckets is 0; expected a whole number of at least 1"),
        ("num_hashes", 0, "num_hashes is 0"),
        ("chunk_size", 0, "chunk_size is 0"),
    ):
        with pytest.raises(ValueError, match=message):
            reformer_attention(q, k, v, **{option: value})
