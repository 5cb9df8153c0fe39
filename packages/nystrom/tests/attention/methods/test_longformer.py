import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from nystrom import reference
from nystrom.attention.methods.longformer import band_of, longformer_attention
from nystrom.attention.methods.softmax import softmax_attention
from nystrom.landmarks import real_index

# float64 rounding of a softmax
CLOSE = {"rtol": 1e-10, "atol": 1e-12}


def draw(seed, n, *, b=2, h=3, d=4, e=5):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(b, h, n, width, generator=g, dtype=torch.float64) for width in (d, d, e)]


def gradients(out, *inputs):
    return torch.autograd.grad(out.square().sum(), inputs)


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 300),
    half=st.sampled_from([0, 1, 5, 16, 70, 150]),
    num_global=st.integers(0, 5),
    masked=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_it_is_the_reference(n, half, num_global, masked, seed):
    q, k, v = (x.requires_grad_() for x in draw(seed, n))
    keep = torch.rand(2, n, generator=torch.Generator().manual_seed(seed)) < 0.6 if masked else None
    if keep is not None:
        keep[:, n // 2] = True
    out = longformer_attention(q, k, v, window=2 * half + 1, num_global=num_global, keep=keep)

    def formula(q, k, v, b, h, places):
        return reference.longformer(q, k, v, window=2 * half + 1, num_global=num_global, places=places)

    expected = reference.by_sequence(formula, q, k, v, keep=keep)
    torch.testing.assert_close(out, expected, **CLOSE)
    for x, y in zip(gradients(out, q, k, v), gradients(expected, q, k, v), strict=True):
        torch.testing.assert_close(x, y, **CLOSE)


@pytest.mark.parametrize(("window", "num_global"), [(23, 0), (3, 12)])
@pytest.mark.parametrize("before", [0, 9])
def test_a_full_window_and_all_global_are_exact(window, num_global, before):
    # Longer than the window, so that the band itself is exact.
    q, k, v = draw(1, 60)
    keep = torch.zeros(2, 60, dtype=torch.bool)
    keep[:, before : before + 12] = True
    out = longformer_attention(q, k, v, window=window, num_global=num_global, keep=keep)
    torch.testing.assert_close(out, softmax_attention(q, k, v, keep=keep), **CLOSE)
    if not num_global:
        narrower = longformer_attention(q, k, v, window=window - 2, keep=keep)
        assert not torch.allclose(narrower, out)


@pytest.mark.parametrize("num_global", [0, 2])
def test_no_query_is_left_without_a_key(num_global):
    keep = torch.arange(40) < torch.tensor([[0], [1], [40]])
    bias = band_of(keep & (real_index(keep)[0] >= num_global), num_global, 8, 3, torch.float32)
    assert (bias == 0).any(dim=-1).all()


class LargeStorages(TorchDispatchMode):
    """Counts the new storages of at least `numbers` numbers."""

    def __init__(self, numbers):
        super().__init__()
        self.numbers, self.count = numbers, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            given = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
            storage = out.untyped_storage()
            is_new = storage.data_ptr() not in given
            self.count += is_new and storage.nbytes() >= self.numbers * out.element_size()
        return out


@pytest.mark.parametrize("masked", [False, True])
def test_the_bias_of_a_mask_is_the_only_tensor_of_its_size(masked):
    q, k, v = draw(3, 640, b=1, h=1, d=2, e=2)
    keep = torch.arange(640)[None] < 600 if masked else None
    # Blocks of 16 queries and 48 keys.
    with LargeStorages(640 * 48) as large:
        longformer_attention(q, k, v, window=33, keep=keep)
    assert large.count == masked


def test_narrow_heads_take_a_few_numbers_a_token():
    inputs = [x.requires_grad_() for x in draw(3, 4096, b=1, h=1, d=1, e=1)]
    # Blocks of 64 queries and 320 keys: a bias for each of them is 320 numbers a token, one for most is 10.
    with LargeStorages(4096 * 16) as large:
        longformer_attention(*inputs).square().sum().backward()
    assert large.count == 0


@pytest.mark.parametrize("num_global", [0, 2])
def test_a_key_out_of_reach_has_no_gradient(num_global):
    q, k, v = (x.requires_grad_() for x in draw(2, 50))
    longformer_attention(q, k, v, window=7, num_global=num_global)[:, :, 30].square().sum().backward()
    reached = [*range(num_global), *range(27, 34)]
    for x in (k, v):
        touched = x.grad.abs().amax(dim=(0, 1, 3)) > 0
        assert touched.nonzero().flatten().tolist() == reached


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("num_global", "real"), [(0, 64), (0, 50), (3, 64), (3, 50)])
def test_it_is_the_attention_of_transformers(dtype, num_global, real):
    pytest.importorskip("transformers")
    from transformers.models.longformer.configuration_longformer import LongformerConfig
    from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

    h, d, n = 2, 8, 64
    config = LongformerConfig(
        hidden_size=h * d, num_attention_heads=h, attention_window=[16], attention_probs_dropout_prob=0.0
    )
    torch.manual_seed(0)
    layer = LongformerSelfAttention(config, 0).to(dtype).eval()
    for name in ("query", "key", "value"):
        # Their global tokens have their own projections; ours are projected once.
        getattr(layer, f"{name}_global").load_state_dict(getattr(layer, name).state_dict())
    x = torch.randn(2, n, h * d, dtype=dtype)
    keep = (torch.arange(n) < real).expand(2, n)
    chosen = (torch.arange(n) < num_global).expand(2, n)
    codes = torch.where(keep, 0.0, -10000.0).masked_fill(chosen, 10000.0).to(dtype)
    with torch.no_grad():
        expected = layer(
            x.clone(),
            attention_mask=codes,
            is_index_masked=codes < 0,
            is_index_global_attn=codes > 0,
            is_global_attn=num_global > 0,
        )[0]
        q, k, v = (getattr(layer, name)(x).unflatten(2, (h, d)).transpose(1, 2) for name in ("query", "key", "value"))
    out = longformer_attention(q, k, v, window=17, num_global=num_global, keep=keep).transpose(1, 2).flatten(2)
    # Their softmax is in float32 for every dtype.
    torch.testing.assert_close(out[:, :real], expected[:, :real], rtol=1e-5, atol=1e-6)


@pytest.mark.refuses
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 256}, "window is 256; expected an odd number.*257 is what others call an attention window of 256"),
        ({"window": 0}, "window is 0"),
        ({"num_global": -1}, "num_global is -1"),
    ],
)
def test_bad_options_raise(options, message):
    with pytest.raises(ValueError, match=message):
        longformer_attention(*draw(3, 9), **options)
