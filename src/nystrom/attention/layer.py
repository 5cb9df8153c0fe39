r"""Nyström attention where `nn.MultiheadAttention(batch_first=True)` stood.

$$\mathrm{out} = W_o\, \mathrm{concat}_h(\hat S_h V_h + \mathrm{skip}(V_h)) + b_o$$
with $\hat S_h$ of `nystrom_attention` and the depthwise convolution of `skip`. Parameters have the names and the
start values of `nn.MultiheadAttention`, so that its state dict loads (with `conv_kernel_size=None`, strictly).

Departs from `nn.MultiheadAttention`: `need_weights` is False unless asked for, since n x s weights do not exist here;
dropout on attention weights is refused for the same reason; masks of queries may be given.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from nystrom.attention.backend import Backend
from nystrom.attention.methods.nystrom import NystromHeads, NystromOptions, nystrom_rows
from nystrom.attention.skip import DepthwiseSkip
from nystrom.checks import check_at_least
from nystrom.landmarks import Landmarks
from nystrom.linalg.pinv import Inverse, StartValue


class NystromAttention(nn.Module):
    """Multi-head attention in linear time and memory.

    Args:
        embed_dim: Width of queries and of the output.
        num_heads: Heads; must divide `embed_dim`.
        num_landmarks: Landmarks m; a sequence of at most m real tokens gets exact attention.
        conv_kernel_size: Odd size of the skip convolution's kernel; None for no skip. Self-attention only.
        landmarks: "segment_means", "uniform" or "kmeans".
        pinv: "iterative", "ridge" or "exact".
        pinv_steps: Iterations of the iterative inverse.
        z0: Start value of the iteration, "paper", "authors" or "sequence".
        backend: "auto", "torch" or "triton", see `nystrom.attention.backend`.
        dropout: Accepted as 0 only: there are no n x s weights to drop.
        bias: Whether the projections have a bias.
        kdim: Width of keys; None means `embed_dim`.
        vdim: Width of values; None means `embed_dim`.
        batch_first: Accepted as True only: inputs are (batch, tokens, width).
        device: Where the parameters live.
        dtype: Their dtype.

    Raises:
        ValueError: Sizes or options that do not fit, dropout or batch_first=False.
    """

    # nn.TransformerEncoderLayer reads these; the second keeps its fused path, which is exact attention, away.
    batch_first = True
    _qkv_same_embed_dim = False

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_landmarks: int = 64,
        conv_kernel_size: int | None = 33,
        landmarks: Landmarks = "segment_means",
        pinv: Inverse = "iterative",
        pinv_steps: int = 6,
        z0: StartValue = "paper",
        backend: Backend = "auto",
        dropout: float = 0.0,
        bias: bool = True,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        check_at_least("embed_dim", embed_dim, 1)
        check_at_least("num_heads", num_heads, 1)
        if embed_dim % num_heads:
            raise ValueError(f"embed_dim {embed_dim} is not a multiple of num_heads {num_heads}.")
        if dropout != 0:
            raise ValueError(
                f"dropout is {dropout}; expected 0: no n x s weights exist to drop. Put nn.Dropout on the output."
            )
        if not batch_first:
            raise ValueError("batch_first is False; expected True: transpose inputs to (batch, tokens, width).")
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        self.kdim, self.vdim = kdim or embed_dim, vdim or embed_dim
        self.heads = NystromHeads(
            num_heads, self.head_dim, NystromOptions(num_landmarks, landmarks, pinv, pinv_steps, z0, None, backend)
        )
        place = {"device": device, "dtype": dtype}
        if self.kdim == self.vdim == embed_dim:
            self.in_proj_weight = nn.Parameter(torch.empty(3 * embed_dim, embed_dim, **place))
        else:
            self.q_proj_weight = nn.Parameter(torch.empty(embed_dim, embed_dim, **place))
            self.k_proj_weight = nn.Parameter(torch.empty(embed_dim, self.kdim, **place))
            self.v_proj_weight = nn.Parameter(torch.empty(embed_dim, self.vdim, **place))
        self.in_proj_bias = nn.Parameter(torch.empty(3 * embed_dim, **place)) if bias else None
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, **place)
        self.conv = None if conv_kernel_size is None else DepthwiseSkip(num_heads, conv_kernel_size).to(device, dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start values of `nn.MultiheadAttention`: Xavier-uniform projections, zero biases."""
        stacked = self.kdim == self.vdim == self.embed_dim
        for weight in (self.in_proj_weight,) if stacked else self._projections():
            nn.init.xavier_uniform_(weight)
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)

    def forward(
        self,
        query: Float[Tensor, "b n embed"] | Float[Tensor, "n embed"],
        key: Float[Tensor, "b s kdim"] | Float[Tensor, "s kdim"],
        value: Float[Tensor, "b s vdim"] | Float[Tensor, "s vdim"],
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        query_padding_mask: Tensor | None = None,
        weight_queries: Int[Tensor, " r"] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend.

        Args:
            query: Queries.
            key: Keys.
            value: Values.
            key_padding_mask: (b, s), True = ignore, as torch has it; or floats, 0 = real and -inf = ignore.
            need_weights: Return rows of the attention matrix, for the queries in `weight_queries`.
            attn_mask: Refused: an n x s mask has no place in linear memory.
            average_attn_weights: Whether rows are averaged over heads.
            is_causal: Refused: landmarks see the whole sequence.
            query_padding_mask: (b, n), True = ignore; None means `key_padding_mask` where n == s, else none.
            weight_queries: Positions of the queries whose rows are wanted.

        Returns:
            The output, shaped as `query`, and the rows (b, r, s), (b, h, r, s) if not averaged, or None. Rows do not
            hold the skip convolution.

        Raises:
            ValueError: What does not fit or cannot be honoured; the message names it.
        """
        self._refuse(attn_mask, is_causal, need_weights, weight_queries)
        batched = query.ndim == 3
        if not batched:
            query, key, value = (self._with_batch(x) for x in (query, key, value))
            key_padding_mask, query_padding_mask = (
                x if x is None else x[None] for x in (key_padding_mask, query_padding_mask)
            )
        keep = _real("key_padding_mask", key_padding_mask)
        query_keep = _real("query_padding_mask", query_padding_mask)
        if self.conv is not None and (query.shape[1] != key.shape[1] or query_keep is not None):
            raise ValueError(
                f"{query.shape[1]} queries attend to {key.shape[1]} keys as cross-attention, but the skip convolution "
                "adds values to queries of the same positions: build the layer with conv_kernel_size=None."
            )
        q, k, v = self._project(query, key, value)
        if self.conv is not None and self.heads.takes_skip:
            out = self.heads(q, k, v, keep=keep, skip=self.conv.weight)
        else:
            out = self.heads(q, k, v, keep=keep, query_keep=query_keep)
            out = out if self.conv is None else self.conv(v, keep=keep, to=out)
        out = self.out_proj(out.transpose(1, 2).flatten(2))
        weights = None
        if weight_queries is not None:
            weights = nystrom_rows(q, k, weight_queries, keep=keep, query_keep=query_keep, options=self.heads.options)
            weights = weights.mean(dim=1) if average_attn_weights else weights
        if batched:
            return out, weights
        return out[0], None if weights is None else weights[0]

    def extra_repr(self) -> str:
        """Sizes and landmarks, for print."""
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, {self.heads.options}"

    def _refuse(
        self, attn_mask: Tensor | None, is_causal: bool, need_weights: bool, weight_queries: Tensor | None
    ) -> None:
        if attn_mask is not None or is_causal:
            name = "attn_mask" if attn_mask is not None else "is_causal"
            raise ValueError(
                f"{name} cannot be honoured: landmarks see the whole sequence. Use nn.MultiheadAttention for causal or "
                "n x s masks, and key_padding_mask for padding."
            )
        if need_weights and weight_queries is None:
            raise ValueError(
                "need_weights is True, but n x s weights do not exist in linear memory: pass weight_queries, the "
                "positions of the queries whose rows you want, or need_weights=False."
            )
        if weight_queries is not None and not need_weights:
            raise ValueError("weight_queries is given but need_weights is False: pass need_weights=True too.")

    def _with_batch(self, x: Tensor) -> Tensor:
        if x.ndim != 2:
            raise ValueError(
                f"an input has shape {tuple(x.shape)}; expected (batch, tokens, width) or (tokens, width)."
            )
        return x[None]

    def _projections(self) -> tuple[Tensor, Tensor, Tensor]:
        if self.kdim == self.vdim == self.embed_dim:
            q, k, v = self.in_proj_weight.chunk(3)
            return q, k, v
        return self.q_proj_weight, self.k_proj_weight, self.v_proj_weight

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project and split heads; each result lies token by token, which the skip convolution likes."""
        biases = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        split = []
        names = (("query", query), ("key", key), ("value", value))
        for (name, x), weight, bias in zip(names, self._projections(), biases, strict=True):
            if x.ndim != 3 or x.shape[-1] != weight.shape[1]:
                raise ValueError(f"{name} has shape {tuple(x.shape)}; expected (batch, tokens, {weight.shape[1]}).")
            split.append(F.linear(x, weight, bias).unflatten(-1, (self.num_heads, -1)).transpose(1, 2))
        q, k, v = split
        return q, k, v


def _real(name: str, ignore: Tensor | None) -> Bool[Tensor, "b s"] | None:
    """Turn torch's convention (True or -inf = ignore) into ours (True = real)."""
    if ignore is None:
        return None
    if ignore.dtype == torch.bool:
        return ~ignore
    if not ignore.is_floating_point():
        raise ValueError(f"{name} has dtype {ignore.dtype}; expected torch.bool (True = ignore) or floats (0 or -inf).")
    keep = ignore == 0
    if not torch.compiler.is_compiling() and not bool((keep | (ignore == -torch.inf)).all()):
        raise ValueError(f"{name} holds floats other than 0 and -inf: a bias per key cannot be honoured.")
    return keep
