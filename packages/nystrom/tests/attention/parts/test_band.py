import pytest
import torch

from nystrom import build_attention
from nystrom.attention.functions import FUNCTIONS
from nystrom.attention.parts.band import attend_globally, pad_to_blocks, windows

SELF = [
    ("longformer", {"window": 5, "num_global": 1}),
    ("bigbird", {"block_size": 2, "num_random_blocks": 1}),
]


def draw(n, *, b=2, h=3, d=4, e=4, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(b, h, n, width, generator=g, dtype=torch.float64) for width in (d, d, e)]


@pytest.mark.parametrize(("size", "half"), [(4, 0), (4, 3), (2, 7), (6, 6)])
def test_windows_are_the_tokens_around_each_block(size, half):
    x = torch.arange(1.0, 13.0).view(1, 12, 1)
    out = windows(x, size, half)
    assert out.shape == (1, 12 // size, size + 2 * half, 1)
    for block in range(12 // size):
        for slot in range(size + 2 * half):
            position = block * size - half + slot
            assert out[0, block, slot, 0] == (position + 1 if 0 <= position < 12 else 0)
    # A view: only the padding is copied.
    assert out.untyped_storage().nbytes() == (12 + 2 * half) * x.element_size()


def test_blocks_hold_all_tokens_and_not_a_block_more():
    assert [pad_to_blocks(torch.ones(n, 1), 4).shape[0] for n in (1, 3, 4, 5, 8, 9)] == [4, 4, 4, 8, 8, 12]
    assert pad_to_blocks(torch.ones(5, 1), 4).flatten().tolist() == [1] * 5 + [0] * 3


def test_global_rows_replace_the_named_queries_alone():
    q, k, v = draw(9)
    out = torch.full_like(v, 7.0)
    positions, real = torch.tensor([[2, 5], [0, 3]]), torch.tensor([[True, True], [True, False]])
    keep = torch.arange(9) < torch.tensor([[9], [6]])
    result = attend_globally(out, q, k, v, positions, real, keep=keep, scale=0.5)
    dense = (0.5 * q @ k.mT).masked_fill(~keep[:, None, None], -torch.inf).softmax(dim=-1) @ v
    named = torch.zeros(2, 9, dtype=torch.bool)
    named[0, [2, 5]] = named[1, 0] = True
    expected = torch.where(named[:, None, :, None], dense, out)
    # float64 rounding of a softmax
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(("name", "options"), SELF)
def test_the_graph_may_be_walked_twice(name, options):
    q, k, v = (x.requires_grad_() for x in draw(30))
    loss = FUNCTIONS[name](q, k, v, **options).square().sum()
    first = torch.autograd.grad(loss, (q, k, v), retain_graph=True)
    again = torch.autograd.grad(loss, (q, k, v))
    torch.testing.assert_close(first, again, rtol=0, atol=0)


@pytest.mark.parametrize(("name", "options"), SELF)
def test_copies_of_the_keys_are_not_kept_for_the_gradient(name, options):
    q, k, v = (x.requires_grad_() for x in draw(240, h=1, d=16, e=16))
    kept = []

    def pack(x):
        kept.append(x.untyped_storage().nbytes() // x.element_size())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        FUNCTIONS[name](q, k, v, **options)
    # The copies would be 1.6 times the keys or more; a block of padding and a row to spare are less.
    assert max(kept) <= 1.1 * q.numel()


@pytest.mark.refuses
@pytest.mark.parametrize(("name", "options"), SELF)
@pytest.mark.parametrize("n", [3, 40])
def test_queries_of_other_tokens_raise(name, options, n):
    q, k, v = draw(30)
    other = draw(n)[0]
    with pytest.raises(
        ValueError, match=f"q holds {n} tokens and k holds 30, but {name} is self-attention.*use 'nystrom'"
    ):
        FUNCTIONS[name](other, k, v, **options)
    keep = torch.ones(2, 30, dtype=torch.bool)
    for call in (FUNCTIONS[name], build_attention(name, num_heads=3, head_dim=4, **options)):
        with pytest.raises(ValueError, match=rf"query_keep cannot be honoured: {name}_attention is self-.*Pass keep"):
            call(q, k, v, keep=keep, query_keep=keep)
