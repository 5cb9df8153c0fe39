import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nystrom import build_attention, reference
from nystrom.attention.methods.bigbird import _may, _random_blocks, bigbird_attention
from nystrom.attention.methods.softmax import softmax_attention

# float64 rounding of a softmax
CLOSE = {"rtol": 1e-10, "atol": 1e-12}


def draw(seed, n, *, b=2, h=3, d=4, e=5):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(b, h, n, width, generator=g, dtype=torch.float64) for width in (d, d, e)]


def seeded(seed=5):
    return torch.Generator().manual_seed(seed)


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 130),
    size=st.sampled_from([1, 2, 5, 8]),
    r=st.integers(0, 4),
    masked=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_it_is_the_reference(n, size, r, masked, seed):
    q, k, v = (x.requires_grad_() for x in draw(seed, n))
    keep = torch.rand(2, n, generator=seeded(seed)) < 0.6 if masked else None
    if keep is not None:
        keep[0, : n // 4] = keep[1, n - n // 3 :] = False
        keep[:, n // 2] = True
    draws = torch.rand(3 * r, generator=seeded()).view(3, r)
    out = bigbird_attention(q, k, v, block_size=size, num_random_blocks=r, keep=keep, generator=seeded())

    def formula(q, k, v, b, h, places):
        return reference.bigbird(q, k, v, block_size=size, draws=draws[h], places=places)

    expected = reference.by_sequence(formula, q, k, v, keep=keep)
    torch.testing.assert_close(out, expected, **CLOSE)
    found, wanted = (torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, expected))
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, **CLOSE)


@pytest.mark.parametrize("r", [0, 1, 3])
def test_r_plus_four_blocks_are_exact_and_more_are_not(r):
    # Longer than these blocks, so that the blocks themselves are exact.
    for count in range(1, 4 * (r + 5) + 1):
        q, k, v = (x.requires_grad_() for x in draw(count, 60))
        keep = torch.zeros(2, 60, dtype=torch.bool)
        keep[:, 7 : 7 + count] = True
        out = bigbird_attention(q, k, v, block_size=4, num_random_blocks=r, keep=keep)
        exact = softmax_attention(q, k, v, keep=keep)
        if count <= 4 * (r + 4):
            torch.testing.assert_close(out, exact, **CLOSE)
            found, wanted = (torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, exact))
            for x, y in zip(found, wanted, strict=True):
                torch.testing.assert_close(x, y, **CLOSE)
        else:
            assert not torch.allclose(out, exact)


def test_no_block_is_left_without_a_key():
    real, count = torch.arange(12) < torch.tensor([[0], [1], [5], [12]]), torch.tensor([0, 1, 3, 6])
    drawn, found = _random_blocks(torch.rand(2, 1, generator=seeded()), count, torch.arange(6))
    assert _may(real, drawn, found, count, 2).any(dim=-1).all()


@pytest.mark.parametrize("blocks", [3, 6, 9, 40])
def test_random_blocks_are_distinct_and_new(blocks):
    drawn, found = _random_blocks(torch.rand(4, 3, generator=seeded()), torch.tensor([blocks]), torch.arange(blocks))
    for head in range(4):
        for i in range(1, blocks - 1):
            chosen = drawn[0, head, i][found[0, head, i]].tolist()
            known = {0, i - 1, i, i + 1, blocks - 1}
            assert len(set(chosen) - known) == len(chosen) == min(3, blocks - len(known))


def test_random_blocks_differ_by_head_and_block_and_reach_all_alike():
    blocks, heads = 64, 200
    drawn, _ = _random_blocks(torch.rand(heads, 3, generator=seeded()), torch.tensor([blocks]), torch.arange(blocks))
    assert len({tuple(x) for x in drawn[0, :, 20].tolist()}) > 0.9 * heads
    assert len({tuple(x) for x in drawn[0, 0, 1:-1].tolist()}) > 50
    # Each of the 59 free blocks of a row is drawn with a chance of 3/59: by 200 heads 10 times, with a deviation of 3.
    times = drawn[0, :, 20].flatten().bincount(minlength=blocks)
    assert times[1:19].min() > 0
    assert times[22:63].min() > 0
    assert times.max() < 25


def test_the_number_of_draws_does_not_depend_on_the_length():
    states = []
    for n in (30, 90):
        g = seeded()
        bigbird_attention(*draw(0, n), block_size=2, num_random_blocks=3, generator=g)
        states.append(g.get_state())
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=0)


def test_evaluation_has_random_blocks_too():
    q, k, v = (x.requires_grad_() for x in draw(1, 64))
    attend = build_attention("bigbird", num_heads=3, head_dim=4, block_size=2, num_random_blocks=3).eval()
    attend(q, k, v)[:, :, 30].square().sum().backward()
    # Two tokens of each block: three around, two global, three random.
    reached = (k.grad.abs().amax(dim=-1) > 0).sum(dim=-1)
    assert reached.unique().tolist() == [16]


def test_the_last_real_token_is_global():
    q, k, v = (x.requires_grad_() for x in draw(2, 64))
    keep = (torch.arange(64) >= 5) & (torch.arange(64) < 48)
    out = bigbird_attention(q, k, v, block_size=4, num_random_blocks=1, keep=keep.expand(2, 64))
    out[:, :, 20].square().sum().backward()
    touched = k.grad.abs().amax(dim=(0, 1, 3)) > 0
    # Blocks of four from token 5 on; the last holds tokens 45 to 47.
    assert touched[5:9].all()
    assert touched[45:48].all()
    assert not touched[48:].any()


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("blocks", [8, 11])
def test_it_is_the_attention_of_transformers(training, blocks):
    pytest.importorskip("transformers")
    np = pytest.importorskip("numpy")
    from transformers.models.big_bird.configuration_big_bird import BigBirdConfig
    from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention, BigBirdModel

    h, d, size, r = 2, 8, 4, 3
    config = BigBirdConfig(
        hidden_size=h * d, num_attention_heads=h, block_size=size, num_random_blocks=r, max_position_embeddings=1024
    )
    torch.manual_seed(0)
    layer = BigBirdBlockSparseAttention(config).double().train(training)
    draws = torch.rand(h * r, generator=seeded()).view(h, r).tolist()
    # Their plan comes from numpy's global generator; it is replaced by ours, all else is theirs.
    plans = [np.array([reference.random_blocks(i, blocks, head) for i in range(1, blocks - 1)]) for head in draws]
    layer._bigbird_block_rand_mask_with_head = lambda **_: plans
    x = torch.randn(2, blocks * size, h * d, dtype=torch.float64)
    masks = BigBirdModel.create_masks_for_block_sparse_attn(torch.ones(2, blocks * size).double(), size)
    blocked, band, of_queries, of_keys = masks
    with torch.no_grad():
        expected = layer(x, band, of_queries, of_keys, blocked, blocked)[0]
        q, k, v = (getattr(layer, name)(x).unflatten(2, (h, d)).transpose(1, 2) for name in ("query", "key", "value"))
    out = bigbird_attention(q, k, v, block_size=size, num_random_blocks=r, generator=seeded())
    torch.testing.assert_close(out.transpose(1, 2).flatten(2), expected, **CLOSE)


@pytest.mark.refuses
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 0}, "block_size is 0"),
        ({"num_random_blocks": -1}, "num_random_blocks is -1"),
    ],
)
def test_bad_options_raise(options, message):
    with pytest.raises(ValueError, match=message):
        bigbird_attention(*draw(3, 9), **options)
