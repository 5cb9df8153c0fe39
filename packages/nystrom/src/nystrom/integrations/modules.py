"""Replace the attention of an existing model, in place, by a method of the library.

Each `nn.MultiheadAttention`, and each attention of timm's ViT, Eva (DINOv3) and BEiT, is replaced by a module that
holds the same parameters under the same names. So the state dict and optimizers stay valid, and if the method reaches
its exact limit ("nystrom" with as many landmarks as tokens) the model's results stay the same.

In evaluation `nn.TransformerEncoder` would bypass a layer and pass its weights to a fused exact attention, and padded
sequences as nested tensors; a replacement disables both. Methods draw at random only in training, as their Modules do,
except for the features of "performer", which become part of the state dict.

Self- or cross-attention is not guessed from a call: a module is declared as one of them if its parent shows which
(torch's encoder and decoder layers, those of transformers, timm's). Otherwise the caller declares it; an undeclared
module raises for a call that could be either, see `nystrom.attention.layer`.

Departs from the replaced modules: weights are neither returned nor dropped in training; a warning says so.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from nystrom.attention.heads import AttentionHeads, build_attention, merge_heads, split_heads
from nystrom.attention.layer import MultiheadAttention
from nystrom.attention.options import near_far_sizes
from nystrom.attention.registry import METHODS, check_weightless
from nystrom.checks import check_flag
from nystrom.integrations.nystrom_attention import NystromReplacement, has_hooks, is_nystrom_attention
from nystrom.precision import check_layer_dtype
from nystrom.shapes import check_tensor

# Whether an attribute of this name holds self-attention. Pooling heads do not: their query is learned.
_SAID_BY_TRANSFORMERS = {"self_attn": True, "cross_attn": False, "multihead_attn": False}


def default_options(method: str, longest: int | None = None, *, is_causal: bool = False) -> dict[str, Any]:
    """Default options for a trained model, where they differ from the method's own defaults.

    "reformer" keeps separate keys, with which the layers were trained, and "near_far" gets the sizes of
    `near_far_sizes` for the longest input, in tokens, without selected keys; None if that has no limit or it is
    unknown.
    """
    if method == "near_far" and longest:
        # A model may run on a GPU, on ranks or as ONNX, and may have cross-attention: without selected keys.
        return near_far_sizes(longest, is_causal=is_causal, selects=False)
    return {"shared_qk": False} if method == "reformer" else {}


@dataclass(frozen=True)
class Replaced:
    """The result of `replace_attention`: the names of the replaced modules; its length is their number."""

    self_attention: tuple[str, ...] = ()  # Modules declared as self-attention
    cross_attention: tuple[str, ...] = ()  # Modules declared as cross-attention
    # Modules that neither their parent nor the caller declared. They treat the same object as query and key as
    # self-attention, and raise for two tensors of equal length where it matters.
    undeclared: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.self_attention) + len(self.cross_attention) + len(self.undeclared)

    def __str__(self) -> str:
        parts = [
            f"{kind} in {', '.join(names)}"
            for kind, names in (
                ("self-attention", self.self_attention),
                ("cross-attention", self.cross_attention),
                ("undeclared (pass self_attention=True or False)", self.undeclared),
            )
            if names
        ]
        return f"{len(self)} replaced: {'; '.join(parts)}"


class MultiheadReplacement(MultiheadAttention):
    """A `MultiheadAttention` in place of an `nn.MultiheadAttention`, with its parameters."""

    def __init__(
        self, source: nn.MultiheadAttention, method: str, options: Mapping[str, Any], self_attention: bool | None
    ):
        # The parameters made here are replaced by the source's: on "meta" they take neither memory nor random numbers.
        super().__init__(
            source.embed_dim,
            source.num_heads,
            bias=source.in_proj_bias is not None,
            method="softmax",
            kdim=source.kdim,
            vdim=source.vdim,
            batch_first=source.batch_first,
            self_attention=self_attention,
            device="meta",
        )
        for name, parameter in source.named_parameters(recurse=False):
            setattr(self, name, parameter)
        self.out_proj, self.dropout = source.out_proj, source.dropout
        self.heads = _build(method, source.num_heads, source.head_dim, options, source.out_proj.weight)

    def forward(self, query: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Attend; see `MultiheadAttention.forward`."""
        _warn_of_dropout(self.method, self.dropout if self.training else 0.0)
        return super().forward(query, *args, **kwargs)


class TimmReplacement(nn.Module):
    """Any method in place of an attention of timm, with its layers: projections, norms, gate and output."""

    attn_drop: nn.Dropout
    proj: nn.Module
    proj_drop: nn.Module
    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    k_bias: Tensor
    v_bias: Tensor

    def __init__(self, source: nn.Module, method: str, options: Mapping[str, Any]):
        super().__init__()
        for name, child in source.named_children():
            self.add_module(name, child)
        for name, parameter in source.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        for name, buffer in source.named_buffers(recurse=False):
            self.register_buffer(name, buffer, persistent=name not in source._non_persistent_buffers_set)
        assert isinstance(source.num_heads, int), "timm counts heads"
        self.num_heads, self.method = source.num_heads, method
        joint = getattr(source, "qkv", None)
        # A linear layer, or an adapter around one.
        to_queries: Any = source.q_proj if joint is None else joint
        head_dim = to_queries.out_features // self.num_heads // (1 if joint is None else 3)
        self.heads = _build(method, self.num_heads, head_dim, options, to_queries.weight)

    def forward(
        self,
        x: Float[Tensor, "b n w"],
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        shared_rel_pos_bias: Tensor | None = None,
    ) -> Float[Tensor, "b n o"]:
        """Attend within each sequence; ValueError for a mask or bias per pair of tokens."""
        masks = {"attn_mask": attn_mask, "is_causal": is_causal or None, "shared_rel_pos_bias": shared_rel_pos_bias}
        for name, value in masks.items():
            if value is not None:
                raise ValueError(
                    f"{name} cannot be honoured: {self.method} attention sees the whole sequence, without a weight per "
                    "pair. Leave timm's attention in a model that passes it."
                )
        return self._attend(x)

    def _attend(
        self, x: Float[Tensor, "b n w"], rotate: Callable[[Tensor], Tensor] | None = None
    ) -> Float[Tensor, "b n o"]:
        _warn_of_dropout(self.method, self.attn_drop.p if self.training else 0.0)
        self._check_input(x)
        q, k, v = self._project(x)
        q, k = self._child("q_norm", q), self._child("k_norm", k)
        if rotate is not None:
            q, k = rotate(q).type_as(v), rotate(k).type_as(v)
        groups = self.num_heads // k.shape[1]
        if groups > 1:
            k, v = (part.repeat_interleave(groups, dim=1) for part in (k, v))
        out = self._child("norm", merge_heads(self.heads(q, k, v)))
        gate = getattr(self, "gate", None)
        return self.proj_drop(self.proj(out if gate is None else out * gate(x).sigmoid()))

    def _check_input(self, x: Tensor) -> None:
        check_tensor("x", x)
        joint = getattr(self, "qkv", None)
        first = self.q_proj if joint is None else joint
        width = getattr(first, "in_features", x.shape[-1])
        if x.ndim != 3 or x.shape[2] != width:
            raise ValueError(f"x has shape {tuple(x.shape)}; expected (batch, tokens, width) with width {width}.")
        check_layer_dtype("x", x, first)

    def _project(self, x: Float[Tensor, "b n w"]) -> tuple[Float[Tensor, "b h n d"], ...]:
        joint, heads = getattr(self, "qkv", None), self.num_heads
        if joint is None:
            q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
            d = q.shape[-1] // heads
            return tuple(split_heads(part, part.shape[-1] // d) for part in (q, k, v))
        together = joint(x)
        if (bias := getattr(self, "q_bias", None)) is not None:
            # The bias of the keys is zero: it would change no softmax.
            together = together + torch.cat((bias, self.k_bias, self.v_bias))
        return tuple(split_heads(part, heads) for part in together.chunk(3, dim=-1))

    def _child(self, name: str, x: Tensor) -> Tensor:
        child = getattr(self, name, None)
        return x if child is None else child(x)


class TimmRotaryReplacement(TimmReplacement):
    """Any method in place of an attention of timm with rotary positions (Eva, DINOv3)."""

    def __init__(self, source: nn.Module, method: str, options: Mapping[str, Any]):
        from timm.layers import apply_rot_embed_cat  # type: ignore[import-not-found]

        super().__init__(source, method, options)
        self.rotate, self.rotate_half = apply_rot_embed_cat, getattr(source, "rotate_half", False)
        self.num_prefix_tokens = source.num_prefix_tokens

    def forward(  # type: ignore[override]
        self, x: Float[Tensor, "b n w"], rope: Tensor | None = None, attn_mask: Tensor | None = None, is_causal=False
    ) -> Float[Tensor, "b n o"]:
        """Attend within each sequence, queries and keys rotated; see `TimmReplacement.forward`."""
        if attn_mask is not None or is_causal:
            return super().forward(x, attn_mask, is_causal)

        def rotate(heads: Float[Tensor, "b h n d"]) -> Float[Tensor, "b h n d"]:
            first, rest = heads[:, :, : self.num_prefix_tokens], heads[:, :, self.num_prefix_tokens :]
            return torch.cat([first, self.rotate(rest, rope, half=self.rotate_half)], dim=2)

        return self._attend(x, None if rope is None else rotate)


_TIMM: dict[str, type[TimmReplacement]] = {
    "timm.layers.attention.Attention": TimmReplacement,
    "timm.models.vision_transformer.Attention": TimmReplacement,
    "timm.models.beit.Attention": TimmReplacement,
    "timm.layers.attention.AttentionRope": TimmRotaryReplacement,
    "timm.models.eva.EvaAttention": TimmRotaryReplacement,
}


def replace_attention(
    model: nn.Module,
    method: str = "nystrom",
    options: Mapping[str, Any] | None = None,
    *,
    self_attention: bool | None = None,
) -> Replaced:
    """Replace each `nn.MultiheadAttention`, and each attention of timm and nystrom-attention, in a model, in place.

    Args:
        model: Any model that holds such modules; transformers' models choose by `attn_implementation` instead.
        method: A method without learned weights, by its name in `nystrom.attention.registry.METHODS`.
        options: Options of the method, such as {"num_landmarks": 32}.
        self_attention: Whether queries and keys are the same tokens, for modules whose parent does not show it; None
            leaves them undeclared.

    Returns:
        The replaced modules, by kind.

    Raises:
        ValueError: An unknown method or option, a module that cannot be replaced, or no module to replace. The model is
            then unchanged.
    """
    check_weightless(method)
    if isinstance(model, nn.MultiheadAttention) or _timm_kind(model) or is_nystrom_attention(model):
        raise ValueError(
            f"model is itself {type(model).__name__}, which cannot be replaced in place: pass the model that holds it, "
            "or build a NystromAttention."
        )
    options = default_options(method) | dict(options or {})
    if self_attention is not None:
        check_flag("self_attention", self_attention)
    told = _told_by_parents(model)
    made: dict[nn.Module, nn.Module] = {}
    names: dict[bool | None, list[str]] = {True: [], False: [], None: []}
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            _check_multihead(name, module)
            declarations = told.get(module, {None})
            declared = self_attention if len(declarations) > 1 or None in declarations else next(iter(declarations))
            if declared is False and not METHODS[method].cross_attention:
                raise ValueError(
                    f"{name} is cross-attention, and {method} only takes queries and keys of the same tokens: use "
                    "'nystrom' or 'near_far', or replace the attention of parts of the model."
                )
            names[declared].append(name)
            made[module] = MultiheadReplacement(module, method, options, declared)
        elif (kind := _timm_kind(module)) is not None:
            _check_timm(name, module, model)
            names[True].append(name)
            made[module] = kind(module, method, options)
        elif is_nystrom_attention(module):
            _check_hooks(name, module)
            names[True].append(name)
            made[module] = NystromReplacement(module, method, options)
    if not made:
        raise ValueError(
            f"{type(model).__name__} holds no nn.MultiheadAttention and no attention of timm or nystrom-attention, so "
            "nothing was replaced. "
            'A model of transformers takes attn_implementation="nystrom" after `import nystrom.integrations`; in code '
            "of your own, call nystrom.nystrom_attention(q, k, v) in place of scaled_dot_product_attention(q, k, v)."
        )
    for parent in list(model.modules()):
        if isinstance(parent, nn.TransformerEncoder) and any(module in made for module in parent.modules()):
            parent.use_nested_tensor = False
    for parent in list(model.modules()):
        # Under each of its names: `named_children` has only the first of a module that several layers share.
        for name, child in list(parent._modules.items()):
            if child is not None and child in made:
                setattr(parent, name, made[child].train(child.training))
    return Replaced(*(tuple(names[declared]) for declared in (True, False, None)))


def _build(method: str, num_heads: int, head_dim: int, options: Mapping[str, Any], like: Tensor) -> AttentionHeads:
    heads = build_attention(method, num_heads=num_heads, head_dim=head_dim, **options)
    return heads.to(like.device)


def _told_by_parents(model: nn.Module) -> dict[nn.Module, set[bool | None]]:
    """For each module, whether its parents call it with queries and keys of the same tokens; None if unknown."""
    told: dict[nn.Module, set[bool | None]] = {}
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child is not None:
                told.setdefault(child, set()).add(_said_by(parent, name))
    return told


def _said_by(parent: nn.Module, name: str) -> bool | None:
    if isinstance(parent, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
        return {"self_attn": True, "multihead_attn": False}.get(name)
    kind = type(parent)
    if not kind.__module__.startswith("transformers."):
        return None
    if kind.__name__.endswith("PoolingHead") and name == "attention":
        return False
    return _SAID_BY_TRANSFORMERS.get(name)


def _timm_kind(module: nn.Module) -> type[TimmReplacement] | None:
    return _TIMM.get(_path(module))


def _path(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__name__}"


def _check_timm(name: str, module: nn.Module, model: nn.Module) -> None:
    own = getattr(module, "relative_position_bias_table", None) is not None
    if own or any(_path(part) == "timm.models.beit.RelativePositionBias" for part in model.modules()):
        raise ValueError(
            f"{name} adds a learned bias for each pair of positions, which no method here can honour: leave it as it "
            "is, or build the model without it (use_rel_pos_bias=False, use_shared_rel_pos_bias=False)."
        )
    _check_hooks(name, module)


def _check_multihead(name: str, module: nn.MultiheadAttention) -> None:
    if type(module) is not nn.MultiheadAttention:
        raise ValueError(
            f"{name} is a {type(module).__name__}, a subclass of nn.MultiheadAttention whose own behaviour would be "
            "lost: replace it by nn.MultiheadAttention first, or by a NystromAttention yourself."
        )
    for option, is_on in (("add_zero_attn", module.add_zero_attn), ("add_bias_kv", module.bias_k is not None)):
        if is_on:
            raise ValueError(
                f"{name} was built with {option}=True, an extra key without a token, which no method here can honour: "
                f"leave it as it is, or build the model with {option}=False."
            )
    _check_hooks(name, module)


def _check_hooks(name: str, module: nn.Module) -> None:
    if has_hooks(module):
        raise ValueError(f"{name} has hooks, which a replacement would lose: register them after replace_attention.")


def _warn_of_dropout(method: str, dropout: float) -> None:
    # Python shows a warning of one text and place once.
    if dropout and not torch.compiler.is_compiling():
        warnings.warn(
            f"{method} attention stores no weights, so a dropout of {dropout} on them has no effect in training: build "
            "the model with 0 there, and drop outputs instead.",
            UserWarning,
            stacklevel=3,
        )
