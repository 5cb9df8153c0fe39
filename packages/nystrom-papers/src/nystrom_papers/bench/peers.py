r"""Other implementations as contenders: the published formula, and other packages' modules without their projections.

**The published formula** of Nyström attention. With $Q, K$ each scaled by $d^{-1/4}$, n divisible by m, and
$\tilde Q, \tilde K$ the means of m segments of n / m tokens,
$$F = \mathrm{softmax}(Q \tilde K^\top), \quad A = \mathrm{softmax}(\tilde Q \tilde K^\top), \quad
B = \mathrm{softmax}(\tilde Q K^\top), \qquad \mathrm{out} = (F Z^*)(B V) + \mathrm{conv}(V),$$
where $Z^*$ is six iterations of eq. (14) from $Z_0 = A^\top / \max_j \sum_i A_{ij}$, the maximum taken over batch and
heads, and conv is a depthwise convolution along the tokens with one kernel per head, or is left out. All three matrices
are stored. Written independently in plain torch; the scaling, Z0 and the order of the products are those of the
authors' code.

**Packages.** No projection is timed, so that attention is compared with attention: what projects queries, keys and
values returns the given tensors, and the output is not projected. Most take the layout "tokens" only; none supports
16-bit dtypes on a CPU in every operation, and where one fails, the notes of its rows say so.

- `transformers`: `NystromformerSelfAttention`, which needs n to be a multiple of m known in advance (where n == m it
  runs exact attention instead, and is not timed) and always makes a convolution, which is removed to measure it
  without; `LongformerSelfAttention` without global tokens; `BigBirdBlockSparseAttention` with blocks of 64.
- `nystrom_attention`: `NystromAttention`, whose one input has width 3 h d; so has the gradient of that input.
- `linformer`: `LinformerSelfAttention`, with projections of the tokens that all heads share.
- `performer_pytorch`: `FastAttention`, which takes head-split tensors as they are.
- `reformer_pytorch`: `LSHAttention`, which takes one tensor for queries and keys, with heads in the batch; buckets of
  64.

Source: Xiong et al. (2021), arXiv:2102.03902, eq. (13)-(17) and Fig. 4, for the formula.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from nystrom_papers.bench.inputs import Call, Inputs, call_of_heads, check_multiple

# Tokens of a chunk of Reformer and of a block of BigBird.
CHUNK = 64


class AuthorsAttention(nn.Module):
    """The published formula over head-split tensors: no masks, n divisible by m."""

    def __init__(self, num_heads: int, num_landmarks: int, kernel_size: int | None = None):
        super().__init__()
        self.num_landmarks = num_landmarks
        self.conv = None
        if kernel_size is not None:
            self.conv = nn.Conv2d(
                num_heads, num_heads, (kernel_size, 1), padding=(kernel_size // 2, 0), groups=num_heads, bias=False
            )

    def forward(
        self, q: Float[Tensor, "b h n d"], k: Float[Tensor, "b h n d"], v: Float[Tensor, "b h n e"]
    ) -> Float[Tensor, "b h n e"]:
        """Attend; see the module's formula."""
        scale = q.shape[-1] ** 0.25
        q, k = q / scale, k / scale
        q_landmarks, k_landmarks = self._segment_means(q), self._segment_means(k)
        left = (q @ k_landmarks.mT).softmax(dim=-1)
        a = (q_landmarks @ k_landmarks.mT).softmax(dim=-1)
        right = (q_landmarks @ k.mT).softmax(dim=-1)
        out = (left @ _inverse(a)) @ (right @ v)
        return out if self.conv is None else out + self.conv(v)

    def _segment_means(self, x: Float[Tensor, "b h n d"]) -> Float[Tensor, "b h m d"]:
        return x.unflatten(-2, (self.num_landmarks, -1)).mean(dim=-2)


def _inverse(a: Float[Tensor, "b h m m"]) -> Float[Tensor, "b h m m"]:
    eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    z = a.mT / a.sum(dim=-2).max()
    for _ in range(6):
        az = a @ z
        z = 0.25 * z @ (13 * eye - az @ (15 * eye - az @ (7 * eye - az)))
    return z


def authors_call(inputs: Inputs, number: int, skip: bool) -> Call:
    """The published formula."""
    check_multiple(inputs, number, longer=True)
    return call_of_heads(
        inputs, AuthorsAttention(inputs.sizes.heads, number, inputs.sizes.kernel_size if skip else None)
    )


class Given(nn.Module):
    """A module in the place of a projection, which returns a given tensor (b, n, w).

    Longformer divides its queries in place, and takes a copy (n, b, w), `tokens_first`.
    """

    def __init__(self, x: Tensor, *, tokens_first: bool = False):
        super().__init__()
        self.x, self.tokens_first = x, tokens_first

    def forward(self, hidden_states: Tensor) -> Tensor:
        """The given tensor, for any input."""
        return self.x.transpose(0, 1).clone() if self.tokens_first else self.x


def transformers_call(inputs: Inputs, number: int, skip: bool) -> Call:
    """Nyströmformer's self-attention of Hugging Face transformers."""
    from transformers.models.nystromformer.configuration_nystromformer import NystromformerConfig
    from transformers.models.nystromformer.modeling_nystromformer import NystromformerSelfAttention

    check_multiple(inputs, number, longer=True)
    config = NystromformerConfig(
        **_widths(inputs),
        num_landmarks=number,
        segment_means_seq_len=inputs.n,
        conv_kernel_size=inputs.sizes.kernel_size,
    )
    layer = NystromformerSelfAttention(config)
    if not skip:
        del layer.conv
        layer.conv_kernel_size = None
    _given(inputs, layer)
    return Call(lambda: layer(inputs.leaves[0])[0], (*inputs.leaves, *layer.parameters()))


def nystrom_attention_call(inputs: Inputs, number: int, skip: bool) -> Call:
    """`NystromAttention` of the package nystrom-attention."""
    from nystrom_attention import NystromAttention

    sizes = inputs.sizes
    layer = NystromAttention(
        sizes.heads * sizes.width,
        dim_head=sizes.width,
        heads=sizes.heads,
        num_landmarks=number,
        residual=skip,
        residual_conv_kernel=sizes.kernel_size,
    )
    _given(inputs, layer, names=(), idle=("to_qkv", "to_out"))
    packed = torch.cat([x.detach() for x in inputs.leaves], dim=-1).requires_grad_()
    return Call(lambda: layer(packed), (packed, *layer.parameters()))


def linformer_call(inputs: Inputs, number: int, skip: bool) -> Call:
    """`LinformerSelfAttention` of the package linformer."""
    from linformer.linformer import LinformerSelfAttention

    layer = LinformerSelfAttention(
        inputs.sizes.heads * inputs.sizes.width, inputs.n, k=number, heads=inputs.sizes.heads
    )
    _given(inputs, layer, names=("to_q", "to_k", "to_v"), idle=("to_out",))
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

    return call_of_heads(inputs, FastAttention(inputs.sizes.width, nb_features=number))


def reformer_call(inputs: Inputs, number: int, skip: bool) -> Call:
    """`LSHAttention` of the package reformer-pytorch."""
    from reformer_pytorch import LSHAttention

    check_multiple(inputs, 2 * CHUNK)
    layer = LSHAttention(bucket_size=CHUNK, n_hashes=number).eval()

    def forward() -> Tensor:
        q, _, v = inputs.heads()
        return inputs.merged(layer(q.flatten(0, 1), v.flatten(0, 1))[0].unflatten(0, q.shape[:2]))

    return Call(forward, inputs.leaves)


def longformer_call(inputs: Inputs, number: int, skip: bool) -> Call:
    """Longformer's self-attention of Hugging Face transformers.

    Raises:
        ValueError: A layout, window or length that it cannot take.
    """
    from transformers.models.longformer.configuration_longformer import LongformerConfig
    from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

    if number % 2 == 0:
        raise ValueError("needs a window of an odd number of tokens")
    check_multiple(inputs, number - 1)
    layer = LongformerSelfAttention(LongformerConfig(**_widths(inputs), attention_window=[number - 1]), 0)
    _given(inputs, layer, idle=("query_global", "key_global", "value_global"), tokens_first=True)
    mask = torch.zeros(inputs.sizes.batch, inputs.n, dtype=inputs.sizes.dtype, device=inputs.sizes.device)
    none = mask.bool()

    def forward() -> Tensor:
        masks = {"is_index_masked": none, "is_index_global_attn": none, "is_global_attn": False}
        return layer(inputs.leaves[0], mask, **masks)[0]

    return Call(forward, inputs.leaves)


def bigbird_call(inputs: Inputs, number: int, skip: bool) -> Call:
    """BigBird's block-sparse attention of Hugging Face transformers."""
    from transformers.models.big_bird.configuration_big_bird import BigBirdConfig
    from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention, BigBirdModel

    check_multiple(inputs, CHUNK)
    config = BigBirdConfig(
        **_widths(inputs), block_size=CHUNK, num_random_blocks=number, max_position_embeddings=inputs.n
    )
    layer = _given(inputs, BigBirdBlockSparseAttention(config))
    ones = torch.ones(inputs.sizes.batch, inputs.n, dtype=inputs.sizes.dtype, device=inputs.sizes.device)
    blocked, band, of_queries, of_keys = BigBirdModel.create_masks_for_block_sparse_attn(ones, CHUNK)
    return Call(lambda: layer(inputs.leaves[0], band, of_queries, of_keys, blocked, blocked)[0], inputs.leaves)


def _widths(inputs: Inputs) -> dict[str, Any]:
    """Heads and width by their names in configurations of transformers."""
    return {"hidden_size": inputs.sizes.heads * inputs.sizes.width, "num_attention_heads": inputs.sizes.heads}


def _given(
    inputs: Inputs,
    layer: nn.Module,
    *,
    names: Sequence[str] = ("query", "key", "value"),
    idle: Sequence[str] = (),
    tokens_first: bool = False,
) -> nn.Module:
    """The module, in place: the projections of these names return the inputs, idle ones what they are given.

    Raises:
        ValueError: Inputs that are not laid out token by token.
    """
    if inputs.sizes.layout != "tokens":
        raise ValueError(f"takes the layout 'tokens' only, not {inputs.sizes.layout!r}")
    for name in idle:
        layer.add_module(name, nn.Identity())
    layer.to(inputs.sizes.device, inputs.sizes.dtype).eval()
    for name, x in zip(names, inputs.leaves, strict=False):
        layer.add_module(name, Given(x, tokens_first=tokens_first))
    return layer
