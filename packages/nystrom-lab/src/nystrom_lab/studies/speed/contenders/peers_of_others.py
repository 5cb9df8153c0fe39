"""Other packages' Linformer, Longformer, Performer, Reformer and BigBird as contenders.

As in `peers`, the projections of queries, keys, values and output are taken out, so that attention is compared with
attention, and each module gets its inputs in the form that its forward method expects:

- `linformer`: `LinformerSelfAttention`, with projections of the tokens that all heads share; to_q, to_k and to_v return
  the given tensors, to_out is the identity.
- `performer_pytorch`: `FastAttention`, which takes head-split tensors as they are.
- `reformer_pytorch`: `LSHAttention`, which takes one tensor for queries and keys, with heads in the batch; buckets of
  64.
- `transformers`: `LongformerSelfAttention` without global tokens and `BigBirdBlockSparseAttention` with blocks of 64;
  their projections return the given tensors, copies of them for Longformer.

None of them supports 16-bit dtypes on a CPU in every operation; where one fails, the notes of its rows say so.
"""

import torch
from torch import Tensor, nn

from nystrom_lab.studies.speed.contenders.inputs import Call, Inputs, call_of_heads
from nystrom_lab.studies.speed.contenders.peers import Given, check_layout

REFORMER_CHUNK = 64
BIGBIRD_BLOCK = 64


def linformer_call(inputs: Inputs, number: int, skip: bool) -> Call:
    """`LinformerSelfAttention` of the package linformer.

    Raises:
        ValueError: A layout that it cannot take.
    """
    from linformer.linformer import LinformerSelfAttention

    check_layout(inputs)
    sizes = inputs.sizes
    layer = LinformerSelfAttention(sizes.heads * sizes.width, inputs.n, k=number, heads=sizes.heads)
    for name, x in zip(("to_q", "to_k", "to_v"), inputs.leaves, strict=True):
        layer.add_module(name, Given(x))
    layer.add_module("to_out", nn.Identity())
    layer.to(sizes.device, sizes.dtype).eval()
    return Call(lambda: layer(inputs.leaves[0]), (*inputs.leaves, *layer.parameters()))


def performer_call(inputs: Inputs, number: int, skip: bool) -> Call:
    """`FastAttention` of the package performer-pytorch.

    Raises:
        ValueError: The package, which needs distutils, cannot be imported.
    """
    try:
        from performer_pytorch import FastAttention
    except ImportError as error:
        raise ValueError(
            f"performer-pytorch cannot be imported ({error}); on Python 3.12 install setuptools"
        ) from error

    return call_of_heads(inputs, FastAttention(inputs.sizes.width, nb_features=number), None)


def reformer_call(inputs: Inputs, number: int, skip: bool) -> Call:
    """`LSHAttention` of the package reformer-pytorch.

    Raises:
        ValueError: A length that its buckets do not divide.
    """
    from reformer_pytorch import LSHAttention

    _check_multiple(inputs, 2 * REFORMER_CHUNK)
    layer = LSHAttention(bucket_size=REFORMER_CHUNK, n_hashes=number).eval()

    def forward() -> Tensor:
        q, _, v = inputs.heads()
        out = layer(q.flatten(0, 1), v.flatten(0, 1))[0]
        return inputs.merged(out.unflatten(0, q.shape[:2]))

    return Call(forward, inputs.leaves)


def longformer_call(inputs: Inputs, number: int, skip: bool) -> Call:
    """Longformer's self-attention of Hugging Face transformers.

    Raises:
        ValueError: A layout, window or length that it cannot take.
    """
    from transformers.models.longformer.configuration_longformer import LongformerConfig
    from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

    check_layout(inputs)
    if number % 2 == 0:
        raise ValueError("needs a window of an odd number of tokens")
    _check_multiple(inputs, number - 1)
    sizes = inputs.sizes
    config = LongformerConfig(
        hidden_size=sizes.heads * sizes.width, num_attention_heads=sizes.heads, attention_window=[number - 1]
    )
    layer = LongformerSelfAttention(config, 0).to(sizes.device, sizes.dtype).eval()
    for name, x in zip(("query", "key", "value"), inputs.leaves, strict=True):
        layer.add_module(name, _TokensFirst(x))
    for name in ("query_global", "key_global", "value_global"):
        layer.add_module(name, nn.Identity())
    mask = torch.zeros(sizes.batch, inputs.n, dtype=sizes.dtype, device=sizes.device)
    nothing = torch.zeros(sizes.batch, inputs.n, dtype=torch.bool, device=sizes.device)

    def forward() -> Tensor:
        return layer(
            inputs.leaves[0], mask, is_index_masked=nothing, is_index_global_attn=nothing, is_global_attn=False
        )[0]

    return Call(forward, inputs.leaves)


def bigbird_call(inputs: Inputs, number: int, skip: bool) -> Call:
    """BigBird's block-sparse attention of Hugging Face transformers.

    Raises:
        ValueError: A layout or length that it cannot take.
    """
    from transformers.models.big_bird.configuration_big_bird import BigBirdConfig
    from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention, BigBirdModel

    check_layout(inputs)
    _check_multiple(inputs, BIGBIRD_BLOCK)
    sizes = inputs.sizes
    config = BigBirdConfig(
        hidden_size=sizes.heads * sizes.width,
        num_attention_heads=sizes.heads,
        block_size=BIGBIRD_BLOCK,
        num_random_blocks=number,
        max_position_embeddings=inputs.n,
    )
    layer = BigBirdBlockSparseAttention(config).to(sizes.device, sizes.dtype).eval()
    for name, x in zip(("query", "key", "value"), inputs.leaves, strict=True):
        layer.add_module(name, Given(x))
    ones = torch.ones(sizes.batch, inputs.n, dtype=sizes.dtype, device=sizes.device)
    blocked, band, of_queries, of_keys = BigBirdModel.create_masks_for_block_sparse_attn(ones, BIGBIRD_BLOCK)
    return Call(
        lambda: layer(inputs.leaves[0], band, of_queries, of_keys, blocked, blocked)[0],
        inputs.leaves,
    )


class _TokensFirst(nn.Module):
    """Returns a copy (n, b, w) of a tensor (b, n, w): Longformer divides its queries in place."""

    def __init__(self, x: Tensor):
        super().__init__()
        self.x = x

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.x.transpose(0, 1).clone()


def _check_multiple(inputs: Inputs, size: int) -> None:
    if inputs.n % size:
        raise ValueError(f"needs a length that is a multiple of {size}")
