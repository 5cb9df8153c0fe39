"""Other packages on docs/from-nystrom-attention.md: the same numbers by the options that it names.

For a package that is not installed for tests, `peers.safetensors` has its results: xformers 0.0.28, NystromAttention
(2 heads, 4 landmarks, conv_kernel_size=5); torchmil 1.0.2 (8 to 6 channels, 2 heads, 4 landmarks), on torch 2.13.
"""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch.testing import assert_close

from nystrom import (
    linformer_attention,
    longformer_attention,
    nystrom_attention,
    performer_attention,
    reformer_attention,
)
from nystrom.attention.skip import DepthwiseSkip

# float32.
CLOSE = {"rtol": 0, "atol": 1e-5}


def split(x, heads):
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def merge(x):
    return x.transpose(1, 2).flatten(2)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def saved():
    return load_file(Path(__file__).with_name("peers.safetensors"))


@pytest.mark.parametrize("n", [64, 50])
@pytest.mark.parametrize("shared", [None, "one_kv_head", "share_kv"])
def test_linformer_by_its_projections_transposed(n, shared):
    package = pytest.importorskip("linformer")
    theirs = package.LinformerSelfAttention(24, seq_len=64, k=8, heads=3, **({shared: True} if shared else {}))
    x = torch.randn(2, n, 24)
    q, k = split(theirs.to_q(x), 3), split(theirs.to_k(x), 1 if shared == "one_kv_head" else 3)
    v, of_values = k, theirs.proj_k
    if shared != "share_kv":
        v, of_values = split(theirs.to_v(x), k.shape[1]), theirs.proj_v
    out = linformer_attention(q, k.expand_as(q), v.expand_as(q), theirs.proj_k.mT[None], of_values.mT[None])
    assert_close(theirs.to_out(merge(out)), theirs(x), **CLOSE)


@pytest.mark.filterwarnings("ignore:.*amp:FutureWarning")
def test_performer_by_its_projection_but_for_the_constant_that_it_adds():
    package = pytest.importorskip("performer_pytorch.performer_pytorch")
    theirs = package.FastAttention(16, nb_features=64)
    q, k, v = (torch.randn(2, 3, 50, 16) for _ in range(3))
    ours, projection = performer_attention(q, k, v, theirs.projection_matrix), theirs.projection_matrix
    features = [package.softmax_kernel(x, projection_matrix=projection, is_query=x is q, eps=0.0) for x in (q, k)]
    assert_close(ours, package.linear_attention(*features, v), **CLOSE)
    assert (ours - theirs(q, k, v)).abs().max() > 0.01


def test_reformer_where_all_tokens_are_in_reach_at_a_scale_of_one_over_the_width():
    package = pytest.importorskip("reformer_pytorch")
    qk, v = torch.randn(3, 64, 16), torch.randn(3, 64, 16)
    theirs = package.LSHAttention(bucket_size=32, n_hashes=1).eval()(qk, v)[0]
    options = {"chunk_size": 64, "num_buckets": 1, "num_hashes": 1}
    assert_close(reformer_attention(qk[None], qk[None], v[None], scale=1 / 16, **options)[0], theirs, **CLOSE)
    assert (reformer_attention(qk[None], qk[None], v[None], **options)[0] - theirs).abs().max() > 0.1


@pytest.mark.parametrize("num_global", [0, 1])
def test_longformer_of_transformers_with_one_token_more_in_its_window(num_global):
    peer = pytest.importorskip("transformers.models.longformer.modeling_longformer")
    config = peer.LongformerConfig(hidden_size=32, num_attention_heads=4, attention_window=[8])
    theirs, x = peer.LongformerSelfAttention(config, layer_id=0).eval(), torch.randn(2, 40, 32)
    for name in ("query", "key", "value"):
        getattr(theirs, f"{name}_global").load_state_dict(getattr(theirs, name).state_dict())
    keep = torch.arange(40) < torch.tensor([[40], [32]])
    mask = torch.zeros(2, 40).masked_fill(~keep, torch.finfo(torch.float32).min)
    mask[:, :num_global] = 1.0
    came = theirs(
        x,
        attention_mask=mask,
        is_index_masked=mask < 0,
        is_index_global_attn=mask > 0,
        is_global_attn=bool(num_global),
    )[0]
    q, k, v = (split(part(x), 4) for part in (theirs.query, theirs.key, theirs.value))
    ours = merge(longformer_attention(q, k, v, window=9, num_global=num_global, keep=keep))
    assert_close(ours[keep], came[keep], **CLOSE)


def test_nystrom_of_xformers_at_a_multiple_of_the_landmarks(saved):
    q, k, v, conv, out = (saved[f"xformers.{name}"] for name in ("q", "k", "v", "conv", "out"))
    skip = DepthwiseSkip(2, 5)
    skip.load_state_dict({"weight": conv})
    assert_close(nystrom_attention(q, k, v, num_landmarks=4) + skip(v), out, **CLOSE)


def test_nystrom_of_torchmil_with_zeros_in_front(saved):
    x, out, weight = (saved[f"torchmil.{name}"] for name in ("x", "out", "qkv_nn.weight"))
    project = saved["torchmil.out_proj.weight"], saved["torchmil.out_proj.bias"]
    for front, same in ((2, True), (0, False)):
        q, k, v = (split(part, 2) for part in F.linear(F.pad(x, (0, 0, front, 0)), weight).chunk(3, dim=-1))
        ours = F.linear(merge(nystrom_attention(q, k, v, num_landmarks=4, z0="authors")), *project)[:, front:]
        assert torch.allclose(ours, out, **CLOSE) == same
