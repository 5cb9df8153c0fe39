r"""A drop-in replacement for `nn.MultiheadAttention` with any method.

$$\mathrm{out} = W_o\, \mathrm{concat}_h(\mathrm{attention}(Q_h, K_h, V_h) + \mathrm{skip}(V_h)) + b_o$$
with a method of `nystrom.attention.registry` and the depthwise convolution `skip` if the layer has one. The parameters
have the names and initial values of `nn.MultiheadAttention`, whose state dict it loads (with strict=True if there is no
skip).

`layer(x)` is self-attention: `key_padding_mask` masks queries and keys alike. With three arguments, `self_attention` of
the constructor says whether queries and keys are the same tokens. If it is None, passing the same object as query and
key means self-attention, and anything else cross-attention, whose queries are all real unless `query_padding_mask` is
given. Two tensors of equal length raise an error where the difference would matter. The content of padding reaches
neither outputs nor gradients: it is zeroed before the projection.

Departs from `nn.MultiheadAttention`: inputs are (batch, tokens, width) unless `batch_first` is False; `need_weights` is
False by default, since n x s weights do not exist here; dropout on attention weights raises for the same reason.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from nystrom.attention.caches.near_far_cache import NearFarCache, check_compressed
from nystrom.attention.caches.near_far_context import NearFarContext, near_far_context
from nystrom.attention.heads import attend_in_heads, build_attention, merge_heads, split_heads
from nystrom.attention.mask_values import check_values, unignored_tokens
from nystrom.attention.options import refuse_tolerance, refusing_names_of_the_package
from nystrom.attention.position_bias import PositionBias
from nystrom.attention.registry import METHODS
from nystrom.attention.skip import DepthwiseSkip
from nystrom.checks import Backend, Inverse, Landmarks, StartValue, check_at_least, check_flag
from nystrom.precision import check_dtype
from nystrom.shapes import Masks, check_positions, check_tensor, check_weight_device, cross_masks, row_per_token


class MultiheadAttention(nn.Module):
    """Multi-head attention by any method of the library.

    Args:
        embed_dim: Width of queries and of the output.
        num_heads: Heads; must divide `embed_dim`, unless `head_dim` is given.
        dropout: Accepted as 0 only: there are no n x s weights to drop.
        bias: Whether the projections have a bias.
        method: Name of the method.
        conv_kernel_size: Odd size of the skip convolution's kernel; None for no skip. Self-attention only.
        kdim: Width of keys; None means `embed_dim`.
        vdim: Width of values; None means `embed_dim`.
        head_dim: Width of one head; None means `embed_dim` / `num_heads`. Any other width gives the projections shapes
            that differ from `nn.MultiheadAttention`.
        batch_first: Whether inputs are (batch, tokens, width) rather than (tokens, batch, width).
        self_attention: Whether query and key of a call with three arguments are the same tokens; None treats the same
            object passed as both as self-attention.
        device: Device of the parameters.
        dtype: Dtype of the parameters.
        **options: Options of the method, see `nystrom.attention.options`.

    Raises:
        ValueError: Invalid sizes, an unknown method or option, or an invalid value.
    """

    # Read by nn.TransformerEncoderLayer: keeps it from taking its fused path, which is exact attention.
    _qkv_same_embed_dim = False

    @refusing_names_of_the_package
    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        *,
        method: str,
        conv_kernel_size: int | None = None,
        kdim: int | None = None,
        vdim: int | None = None,
        head_dim: int | None = None,
        batch_first: bool = True,
        self_attention: bool | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ):
        super().__init__()
        kdim, vdim = (embed_dim if width is None else width for width in (kdim, vdim))
        for name, flag in (("bias", bias), ("batch_first", batch_first)):
            check_flag(name, flag)
        if self_attention is not None:
            check_flag("self_attention", self_attention)
        for name, size in (("embed_dim", embed_dim), ("num_heads", num_heads), ("kdim", kdim), ("vdim", vdim)):
            check_at_least(name, size, 1)
        if head_dim is not None:
            check_at_least("head_dim", head_dim, 1)
        elif embed_dim % num_heads:
            raise ValueError(f"embed_dim {embed_dim} is not a multiple of num_heads {num_heads}: pass head_dim.")
        if dropout != 0:
            raise ValueError(
                f"dropout is {dropout}; expected 0: no n x s weights exist to drop. Put nn.Dropout on the output."
            )
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.head_dim = embed_dim // num_heads if head_dim is None else head_dim
        inner = num_heads * self.head_dim
        self.kdim, self.vdim, self.batch_first, self.dropout = kdim, vdim, batch_first, 0.0
        self.self_attention = self_attention
        self.heads = build_attention(method, num_heads=num_heads, head_dim=self.head_dim, **options).to(device, dtype)
        place = {"device": device, "dtype": dtype}
        if self._is_stacked:
            self.in_proj_weight = nn.Parameter(torch.empty(3 * inner, embed_dim, **place))
        else:
            self.q_proj_weight = nn.Parameter(torch.empty(inner, embed_dim, **place))
            self.k_proj_weight = nn.Parameter(torch.empty(inner, kdim, **place))
            self.v_proj_weight = nn.Parameter(torch.empty(inner, vdim, **place))
        self.in_proj_bias = nn.Parameter(torch.empty(3 * inner, **place)) if bias else None
        self.out_proj = nn.Linear(inner, embed_dim, bias=bias, **place)
        self.conv = None if conv_kernel_size is None else DepthwiseSkip(num_heads, conv_kernel_size).to(device, dtype)
        if self_attention is False:
            self._check_cross("self_attention is False")
        self.reset_parameters()

    @property
    def method(self) -> str:
        """Name of the method."""
        return self.heads.method

    @property
    def _is_stacked(self) -> bool:
        """Whether one matrix holds all three projections, as in nn.MultiheadAttention."""
        return self.kdim == self.vdim == self.embed_dim

    def reset_parameters(self) -> None:
        """Initial values of `nn.MultiheadAttention`: Xavier-uniform projections, zero biases."""
        for weight in (self.in_proj_weight,) if self._is_stacked else self._projections():
            nn.init.xavier_uniform_(weight)
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)

    @refusing_names_of_the_package
    def forward(
        self,
        query: Float[Tensor, "b n embed"] | Float[Tensor, "n embed"],
        key: Float[Tensor, "b s kdim"] | Float[Tensor, "s kdim"] | None = None,
        value: Float[Tensor, "b s vdim"] | Float[Tensor, "s vdim"] | None = None,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        query_padding_mask: Tensor | None = None,
        cu_seqlens: Int[Tensor, " ends"] | None = None,
        weight_queries: Int[Tensor, " r"] | None = None,
        bias: PositionBias | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend.

        Args:
            query: Queries; if given alone, also the keys and values.
            key: Keys; see `self_attention` of the constructor.
            value: Values.
            key_padding_mask: (b, s), True = ignore, as in torch; or floats, 0 = real and -inf = ignore. The functions'
                `keep` is the other way round, True = real: pass ~keep. A sequence that is entirely ignored gives zeros
                before the output projection, without an error.
            need_weights: Return rows of the attention matrix, for the queries in `weight_queries`.
            attn_mask: An n x s mask does not fit in linear memory, and raises. Only the causal one is taken, together
                with `is_causal`, as torch's own modules pass it; it is compared, and not used.
            average_attn_weights: Whether rows are averaged over heads.
            is_causal: Causal attention: a query sees no later token; self-attention by `near_far`, without a skip.
            query_padding_mask: (b, n), True = ignore, the opposite of `query_keep`; for cross-attention only, since
                self-attention has one mask for both.
            cu_seqlens: Start of each packed sequence, and the end of the last: 0, ..., n, in a batch of one, or a query
                (n, embed). Each attends only to itself.
            weight_queries: Positions of the queries whose rows are wanted.
            bias: A function of positions that is added to the scores: `nystrom.RelativeBuckets`, `nystrom.Alibi` or
                `nystrom.Alibi2d`; self-attention by `near_far` or `softmax`.

        Returns:
            The output, shaped like `query`, and the rows, or None. Rows have the shape (b, r, s), or (b, h, r, s) if
            not averaged, and do not include the skip convolution. The output does not depend on them: its gradient by
            them, which Grad-rollout weighs them by, does not exist.

        Raises:
            ValueError: An invalid or unsupported argument; the message names it.
        """
        self._check_call(attn_mask, is_causal, need_weights, weight_queries)
        _check_packed(cu_seqlens, key_padding_mask, query_padding_mask, weight_queries)
        alone = key is None and value is None
        if alone:
            key = value = query
        if key is None or value is None:
            raise ValueError(f"{'key' if key is None else 'value'} is missing: pass query alone, or all three.")
        # Views are new objects: note now which inputs are the same object, so that each is masked only once.
        one_key, one_value = key is query, value is key
        unbatched = isinstance(query, Tensor) and query.ndim == 2
        query, key, value = self._in_batches(unbatched, query=query, key=key, value=value)
        if unbatched:
            key_padding_mask, query_padding_mask = (
                x if x is None else x[None] for x in (key_padding_mask, query_padding_mask)
            )
        if attn_mask is not None:
            _check_causal_mask(attn_mask, query.shape[1])
        is_self = self._is_self(alone, one_key, query, key, key_padding_mask, query_padding_mask)
        of_self = {"is_causal": is_causal, "cu_seqlens": cu_seqlens is not None, "bias": bias is not None}
        for name, given in of_self.items():
            if given and not is_self:
                raise ValueError(
                    f"{name} is given, which is self-attention, but query and key are different tokens: leave it out, "
                    "or call layer(x)."
                )
        if weight_queries is not None and bias is not None:
            raise ValueError("bias is given, and weight_queries: rows exist without a bias alone. Leave one out.")
        if weight_queries is not None:
            check_positions("weight_queries", weight_queries, query[:, None])
        keep = _real("key_padding_mask", key_padding_mask, key)
        query_keep = keep if is_self else _real("query_padding_mask", query_padding_mask, query)
        masks = Masks(keep, cu_seqlens=cu_seqlens)
        if not is_self:
            masks = cross_masks(key, keep, query_keep, declared=METHODS[self.method].positional)
        # The gradient of a weight is a sum over all tokens, in which even zero times NaN is NaN.
        query = _without_padding(query, query_keep)
        key = query if one_key and is_self else _without_padding(key, keep)
        value = key if one_value else _without_padding(value, keep)
        q, k, v = self._project(query=query, key=key, value=value)
        out = attend_in_heads(self.heads, q, k, v, masks=masks, conv=self.conv, is_causal=is_causal, bias=bias)
        weights = None
        if weight_queries is not None:
            weights = self._rows_of(q, k, v, weight_queries, masks)
            weights = weights.mean(dim=1) if average_attn_weights else weights
            weights = weights[0] if unbatched else weights
        return self._project_out(out, unbatched), weights

    def context(
        self,
        key: Float[Tensor, "b s kdim"],
        value: Float[Tensor, "b s vdim"] | None = None,
        key_padding_mask: Tensor | None = None,
        *,
        queries: Float[Tensor, "b n embed"] | None = None,
    ) -> "LayerContext":
        """Compress keys and values once, for cross-attention of many queries: `layer.context(key, value)(query)`.

        Args:
            key: Keys.
            value: Values; None means `key`.
            key_padding_mask: (b, s), True = ignore, the opposite of `key_keep`.
            queries: A sample of the queries to come, which determine the heavy keys; None if none are known yet.

        Returns:
            The context: `num_heavy` heavy keys and `num_clusters` clusters per head.

        Raises:
            ValueError: The layer uses another method or is self-attention, or an argument is invalid.
        """
        _check_context(self)
        value = key if value is None else value
        key, value = self._in_batches(key=key, value=value)
        keep = _real("key_padding_mask", key_padding_mask, key)
        projected = self._project(key=_without_padding(key, keep), value=_without_padding(value, keep))
        if queries is not None:
            projected += self._project(query=self._in_batches(query=queries)[0])
        k, v, *sample = (split_heads(x, self.num_heads) for x in projected)
        options = self.heads.options
        entries = near_far_context(
            k,
            v,
            queries=sample[0] if sample else None,
            num_heavy=options.num_heavy,
            num_clusters=options.num_clusters,
            iterations=options.iterations,
            scale=options.scale,
            key_keep=keep,
        )
        return LayerContext(self, entries.keys, entries.values, entries.sizes)

    def new_cache(self, batch: int) -> "LayerCache":
        """An empty cache, for causal attention a few tokens at a time: `cache(x)`.

        Args:
            batch: Number of sequences.

        Raises:
            ValueError: The layer uses another method, has a skip, is built for cross-attention, has tokens that are
                split across ranks, or has offloaded weights.
        """
        return LayerCache(self, batch)

    def extra_repr(self) -> str:
        """Sizes, shown by print; the heads name the method."""
        declared = "" if self.self_attention is None else f", self_attention={self.self_attention}"
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, batch_first={self.batch_first}{declared}"

    def _in_batches(self, unbatched: bool = False, /, **inputs: Tensor) -> list[Tensor]:
        """Checked inputs as (batch, tokens, width); `unbatched` ones come as (tokens, width)."""
        layout = "(batch, tokens, width)" if self.batch_first else "(tokens, batch, width)"
        for name, x in inputs.items():
            check_tensor(name, x)
            if x.ndim != (2 if unbatched else 3):
                layout = "(tokens, width), as query has" if unbatched else layout
                raise ValueError(f"{name} has shape {tuple(x.shape)}; expected {layout}.")
        self._check_widths(**inputs)
        if unbatched:
            return [x[None] for x in inputs.values()]
        return [x if self.batch_first else x.transpose(0, 1) for x in inputs.values()]

    def _check_widths(self, **inputs: Tensor) -> None:
        """Check width, dtype and device of whichever of query, key and value are given."""
        weight = self.in_proj_weight if self._is_stacked else self.q_proj_weight
        for name, x in inputs.items():
            size = {"query": "embed_dim", "key": "kdim", "value": "vdim"}[name]
            if x.shape[-1] != (width := getattr(self, size)):
                raise ValueError(
                    f"{name} has width {x.shape[-1]}; expected {width}, the layer's {size}: pass such a tensor, or "
                    f"build the layer with {size}={x.shape[-1]}."
                )
            check_dtype(name, x, weight, of="layer")
            check_weight_device("the layer's weight", weight, x)

    def _check_call(
        self, attn_mask: Tensor | None, is_causal: bool, need_weights: bool, weight_queries: Tensor | None
    ) -> None:
        check_flag("is_causal", is_causal)
        if attn_mask is not None and not (is_causal and METHODS[self.method].causal):
            raise ValueError(
                f"attn_mask cannot be honoured: {self.method} attention has no n x s weights to mask. Use "
                "nn.MultiheadAttention for n x s masks, key_padding_mask for padding, and is_causal for a causal one."
            )
        if is_causal and weight_queries is not None:
            raise ValueError(
                "is_causal is True, and weight_queries is given: rows exist only without is_causal. Leave one out."
            )
        if need_weights and self.heads.group is not None:
            raise ValueError(
                "need_weights is True, but the tokens are split across ranks, and each would give rows of its own keys "
                "alone: call the layer on whole sequences for rows."
            )
        if need_weights and weight_queries is None:
            raise ValueError(
                "need_weights is True, but n x s weights do not exist in linear memory: pass weight_queries, the "
                "positions of the queries whose rows you want, or need_weights=False."
            )
        if weight_queries is not None and not need_weights:
            raise ValueError("weight_queries is given but need_weights is False: also pass need_weights=True.")
        if weight_queries is not None and self.training and getattr(self.heads.options, "landmarks", None) == "uniform":
            raise ValueError(
                "weight_queries is given in training, where each call draws new landmarks: rows would come from other "
                "landmarks than the output. Call eval() first, or build the layer with other landmarks."
            )
        if weight_queries is not None and not METHODS[self.method].rows:
            raise ValueError(f"weight_queries is given, but {self.method} attention has no rows of weights to give.")

    def _is_self(
        self,
        alone: bool,
        one_key: bool,
        query: Tensor,
        key: Tensor,
        key_padding_mask: Tensor | None,
        query_padding_mask: Tensor | None,
    ) -> bool:
        """Whether a call is self-attention: as declared, else if query is `alone`, or is the same object as key."""
        declared, one_length = self.self_attention, query.shape[1] == key.shape[1]
        if alone and declared is False:
            raise ValueError(
                "query came alone, as in self-attention, but the layer was built with self_attention=False: also "
                "pass key and value."
            )
        is_self = alone or (one_key if declared is None else declared)
        if is_self:
            if not one_length:
                raise ValueError(
                    f"query holds {query.shape[1]} tokens and key {key.shape[1]}, but the layer was built "
                    "with self_attention=True: build it with self_attention=False for cross-attention."
                )
            if query_padding_mask is not None:
                raise ValueError(
                    "query_padding_mask is given for self-attention, whose queries and keys have one mask: pass "
                    "key_padding_mask alone, or build the layer with self_attention=False for cross-attention."
                )
            return True
        entry = METHODS[self.method]
        able = entry.cross_attention and self.conv is None
        unsaid = key_padding_mask is not None and query_padding_mask is None
        if declared is None and one_length and (unsaid or entry.positional or not able):
            counts = f"{self.method} attention counts" if self.conv is None else "the skip convolution counts"
            why = "key_padding_mask may be the queries' too" if unsaid else f"{counts} them as positions"
            raise ValueError(
                f"query and key are two tensors of {query.shape[1]} tokens, and nothing says whether these are "
                f"the same, but {why}. For self-attention call layer(x), or build the layer with self_attention=True; "
                "for cross-attention build it with self_attention=False."
            )
        self._check_cross("query and key are different tokens")
        return False

    def _check_cross(self, came: str) -> None:
        """Raise for cross-attention if the skip or the method does not support it."""
        if self.conv is not None:
            what, way = "the skip convolution adds values to queries of the same positions", "conv_kernel_size=None"
        elif not METHODS[self.method].cross_attention:
            what, way = f"{self.method} attention takes queries and keys of the same tokens", "another method"
        else:
            return
        raise ValueError(f"{came}, as in cross-attention, but {what}: build the layer with {way}.")

    def _projections(self) -> tuple[Tensor, Tensor, Tensor]:
        if self._is_stacked:
            q, k, v = self.in_proj_weight.chunk(3)
            return q, k, v
        return self.q_proj_weight, self.k_proj_weight, self.v_proj_weight

    def _project(self, **inputs: Tensor) -> list[Tensor]:
        """Project whichever of query, key and value are given."""
        biases = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        projected = []
        for name, weight, bias in zip(("query", "key", "value"), self._projections(), biases, strict=True):
            if name in inputs:
                projected.append(F.linear(inputs[name], weight, bias))
        return projected

    def _project_out(self, x: Float[Tensor, "b n w"], unbatched: bool = False) -> Tensor:
        """The output, laid out as the inputs were."""
        out = self.out_proj(x)
        if unbatched:
            return out[0]
        return out if self.batch_first else out.transpose(0, 1)

    def _rows_of(self, q: Tensor, k: Tensor, v: Tensor, queries: Tensor, masks: Masks) -> Float[Tensor, "b h r s"]:
        q, k, v = (split_heads(x, self.num_heads) for x in (q, k, v))
        return self.heads.rows(q, k, v, queries, masks)


class LayerContext(NearFarContext):
    """Keys and values that a layer has compressed, to be called with queries; made by `MultiheadAttention.context`.

    `LayerContext(layer, **state)` restores it from its state dict. The layer is not part of it.

    Args:
        layer: The layer.
        keys: Heavy keys and mean keys of clusters.
        values: Their values, and the mean values of the clusters.
        sizes: Number of tokens that each entry stands for; 0 for an unused entry.

    Raises:
        ValueError: The layer has no contexts, or invalid shapes.
    """

    def __init__(self, layer: MultiheadAttention, keys: Tensor, values: Tensor, sizes: Tensor):
        _check_context(layer)
        super().__init__(keys, values, sizes)
        self._layer = (layer,)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, query: Float[Tensor, "b n embed"], query_padding_mask: Tensor | None = None
    ) -> Float[Tensor, "b n embed"]:
        """Attend to the context, in time and memory that do not depend on its length.

        Args:
            query: Queries.
            query_padding_mask: (b, n), True = ignore, the opposite of `query_keep`.

        Raises:
            ValueError: Invalid shapes, dtypes or mask.
        """
        (layer,) = self._layer
        (query,) = layer._in_batches(query=query)
        keep = _real("query_padding_mask", query_padding_mask, query)
        (q,) = layer._project(query=_without_padding(query, keep))
        return layer._project_out(merge_heads(super().forward(split_heads(q, layer.num_heads), query_keep=keep)))


class LayerCache(NearFarCache):
    """The tokens that a layer has read, to be called with those that follow; made by `MultiheadAttention.new_cache`.

    The layer is not part of its state.

    Args:
        layer: The layer.
        batch: Number of sequences.

    Raises:
        ValueError: The layer has no caches, see `MultiheadAttention.new_cache`, or an invalid size.
    """

    def __init__(self, layer: MultiheadAttention, batch: int):
        if not METHODS[layer.method].causal:
            raise ValueError(f"{layer.method} attention sees whole sequences, and has no cache: use method='near_far'.")
        if layer.conv is not None or layer.self_attention is False or layer.heads.group is not None:
            what = "has a skip" if layer.conv is not None else "has self_attention=False"
            what = what if layer.heads.group is None else "has tokens that are split across ranks"
            raise ValueError(f"a cache is for causal self-attention, but the layer {what}: build another layer.")
        weight = layer.out_proj.weight
        if weight.device.type == "meta":
            raise ValueError("the layer's weights are offloaded, so a cache has no place: take the hooks off first.")
        dtype = weight.dtype if weight.dtype == torch.float64 else torch.float32
        sizes = {"batch": batch, "num_heads": layer.num_heads, "head_dim": layer.head_dim}
        super().__init__(layer.heads.options, **sizes, device=weight.device, dtype=dtype)
        self._layer = (layer,)

    def forward(self, x: Float[Tensor, "b t embed"]) -> Float[Tensor, "b t embed"]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Read the next tokens, one or many; each attends to those before it and to itself.

        Args:
            x: Tokens of sequences of equal length, without padding.

        Raises:
            ValueError: Shapes or dtypes that do not match the layer, or a gradient is required, which a cache does not
                support.
        """
        (layer,) = self._layer
        (query,) = layer._in_batches(query=x)
        q, k, v = (split_heads(y, layer.num_heads) for y in layer._project(query=query, key=query, value=query))
        return layer._project_out(merge_heads(super().forward(q, k, v)))


class NystromAttention(MultiheadAttention):
    """Multi-head attention in linear time and memory by the Nyström method, with the skip convolution of the paper.

    Args:
        embed_dim: Width of queries and of the output.
        num_heads: Heads; must divide `embed_dim`, unless `head_dim` is given.
        dropout: Accepted as 0 only: there are no n x s weights to drop.
        bias: Whether the projections have a bias.
        num_landmarks: Landmarks m; a sequence of at most m real tokens gets exact attention.
        conv_kernel_size: Odd size of the skip convolution's kernel; None for no skip. Self-attention only.
        landmarks: "segment_means", "uniform" or "kmeans".
        pinv: "iterative", "ridge" or "exact".
        pinv_steps: Iterations of the iterative inverse.
        z0: Initial value of the iteration: "paper", "authors" or "sequence".
        scale: Factor on the scores; None means 1 / sqrt(head width).
        backend: "auto", "torch" or "triton".
        exact_heads: Numbers of the heads that attend exactly; the others use Nyström attention.
        tolerance: Most relative error of a head's attention in one call, or else it attends exactly; None for no limit.
        kdim: Width of keys; None means `embed_dim`.
        vdim: Width of values; None means `embed_dim`.
        head_dim: Width of one head; None means `embed_dim` / `num_heads`. Any other width gives the projections shapes
            that differ from `nn.MultiheadAttention`.
        batch_first: Whether inputs are (batch, tokens, width) rather than (tokens, batch, width).
        self_attention: Whether query and key of a call with three arguments are the same tokens; None treats the same
            object passed as both as self-attention.
        device: Device of the parameters.
        dtype: Dtype of the parameters.

    Raises:
        ValueError: Invalid sizes or options.
    """

    @refusing_names_of_the_package
    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        *,
        num_landmarks: int = 64,
        conv_kernel_size: int | None = 33,
        landmarks: Landmarks = "segment_means",
        pinv: Inverse = "iterative",
        pinv_steps: int = 6,
        z0: StartValue = "paper",
        scale: float | None = None,
        backend: Backend = "auto",
        exact_heads: Sequence[int] = (),
        tolerance: float | None = None,
        kdim: int | None = None,
        vdim: int | None = None,
        head_dim: int | None = None,
        batch_first: bool = True,
        self_attention: bool | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(
            embed_dim,
            num_heads,
            dropout,
            bias,
            method="nystrom",
            conv_kernel_size=conv_kernel_size,
            kdim=kdim,
            vdim=vdim,
            head_dim=head_dim,
            batch_first=batch_first,
            self_attention=self_attention,
            device=device,
            dtype=dtype,
            num_landmarks=num_landmarks,
            landmarks=landmarks,
            pinv=pinv,
            pinv_steps=pinv_steps,
            z0=z0,
            scale=scale,
            backend=backend,
            exact_heads=exact_heads,
            tolerance=tolerance,
        )


def _check_context(layer: MultiheadAttention) -> None:
    if layer.method != "near_far" or layer.self_attention or layer.conv is not None:
        raise ValueError(
            f"a context is for cross-attention by near_far, but this layer has method={layer.method!r}, "
            f"self_attention={layer.self_attention} and conv={layer.conv}: build it with method='near_far' and "
            "self_attention=False."
        )
    if layer.heads.group is not None:
        raise ValueError(
            "the tokens are split across ranks, and a context would hold this rank's keys only: make it from whole "
            "sequences, on a layer in one process."
        )
    selected, backend = layer.heads.options.num_selected, layer.heads.options.backend
    if selected or backend == "triton":
        raise ValueError(
            f"a context has no blocks that select keys and no kernels, but this layer has num_selected={selected} and "
            f"backend={backend!r}: build it with 0 and 'torch'."
        )
    check_compressed(layer.heads.options)
    refuse_tolerance(layer.heads.options.tolerance, "a context keeps some keys alone")


def _check_packed(cu_seqlens: Tensor | None, *others: Tensor | None) -> None:
    """Check that packed sequences come without masks."""
    if cu_seqlens is not None and any(x is not None for x in others):
        raise ValueError(
            "cu_seqlens is given, of packed sequences without padding: leave out key_padding_mask, "
            "query_padding_mask and weight_queries."
        )


def _without_padding(x: Float[Tensor, "b n w"], keep: Bool[Tensor, "b n"] | None) -> Float[Tensor, "b n w"]:
    return x if keep is None else torch.where(keep[..., None], x, 0.0)


def _real(name: str, ignore: Tensor | None, x: Tensor) -> Bool[Tensor, "b s"] | None:
    """Turn torch's convention (True or -inf = ignore) into ours (True = real)."""
    if ignore is None:
        return None
    check_tensor(name, ignore)
    if ignore.shape != x.shape[:2]:
        wanted = f"{name} has shape {tuple(ignore.shape)}; expected one value per token, {tuple(x.shape[:2])}."
        way_out = row_per_token(name, ignore, x) if ignore.ndim != 2 else ""
        raise ValueError(f"{wanted} {way_out}".strip())
    return unignored_tokens(name, ignore)


def _check_causal_mask(mask: Tensor, n: int) -> None:
    """Raise unless a mask, of booleans (True = ignore) or of 0 and -inf, says what is_causal says."""
    check_tensor("attn_mask", mask)
    message = (
        f"attn_mask of shape {tuple(mask.shape)} is not the causal mask of {n} tokens, which is_causal asks for: pass "
        "that or None, and key_padding_mask for padding."
    )
    if mask.shape != (n, n):
        raise ValueError(message)
    later = torch.ones(n, n, dtype=torch.bool, device=mask.device).triu(1)
    same = mask == later if mask.dtype == torch.bool else torch.where(later, mask == -torch.inf, mask == 0)
    check_values(same.all(), message)
