"""Replacements for modules of the package nystrom-attention, with the same weights, names and state dict.

    from_nystrom_attention(module)                        this library's results: padding changes nothing
    from_nystrom_attention(module, zeros_in_front=True)   the package's results, up to rounding

The package pads the front with zeros to a multiple of the landmarks, counts them as real tokens, and starts its inverse
from the largest column sum of the whole batch. It also uses landmarks, rather than exact attention, if there are fewer
tokens than landmarks. `zeros_in_front` reproduces all of this; it takes no mask, since landmarks would then depend on
where the padding is.

Source: https://github.com/lucidrains/nystrom-attention, 0.0.14.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from nystrom.attention.heads import build_attention, merge_heads, split_heads
from nystrom.attention.registry import METHODS, check_weightless
from nystrom.attention.skip import DepthwiseSkip, depthwise_skip
from nystrom.checks import check_flag
from nystrom.linalg import pinv
from nystrom.precision import check_layer_dtype
from nystrom.shapes import Masks, check_keep, check_positions, check_tensor


class NystromReplacement(nn.Module):
    """Any method in place of a `NystromAttention` of the package, with its layers: projections, output and skip."""

    to_qkv: nn.Linear
    to_out: nn.Sequential

    def __init__(self, source: nn.Module, method: str, options: Mapping[str, Any], *, zeros_in_front: bool = False):
        super().__init__()
        self.num_heads, self.zeros_in_front = int(source.heads), zeros_in_front  # pyright: ignore[reportArgumentType]
        for name, child in source.named_children():
            self.add_module(name, _as_skip(child) if name == "res_conv" else child)
        head_dim = self.to_qkv.out_features // (3 * self.num_heads)
        if method == "nystrom":
            own = {"num_landmarks": source.num_landmarks, "pinv_steps": source.pinv_iterations}
            options = own | ({"z0": "authors"} if zeros_in_front else {}) | dict(options)
        self.method_heads = build_attention(method, num_heads=self.num_heads, head_dim=head_dim, **options)
        self.method_heads.to(self.to_qkv.weight.device)

    def forward(
        self,
        x: Float[Tensor, "b n dim"],
        mask: Bool[Tensor, "b n"] | None = None,
        return_attn: bool = False,
        return_attn_matrices: bool = False,
        *,
        weight_queries: Int[Tensor, " r"] | None = None,
    ) -> Float[Tensor, "b n dim"] | tuple[Tensor, Tensor]:
        """Attend within each sequence.

        Args:
            mask: Real tokens, True = real.
            return_attn: Not supported, as `return_attn_matrices`, since n x n weights do not exist here; raises.
            weight_queries: Positions of the tokens whose rows of the attention matrix are returned, such as 0 for a
                class token. Rows do not include the skip; rows of "nystrom" may be negative. The output does not depend
                on them, so it has no gradient by them.

        Returns:
            The output, and with `weight_queries` the rows (b, h, r, n).

        Raises:
            ValueError: An invalid or unsupported argument.
        """
        check_tensor("x", x)
        if x.ndim != 3 or x.shape[2] != self.to_qkv.in_features:
            raise ValueError(
                f"x has shape {tuple(x.shape)}; expected (batch, tokens, width) with width {self.to_qkv.in_features}."
            )
        check_layer_dtype("x", x, self.to_qkv)
        if return_attn or return_attn_matrices:
            raise ValueError(
                "return_attn asks for n x n weights, which do not exist in linear memory: pass weight_queries, the "
                "positions of the tokens whose rows you want."
            )
        check_keep("mask", mask, x, "x")
        if mask is not None and self.zeros_in_front:
            raise ValueError(
                "mask is given, and zeros_in_front is True: the package's landmarks then depend on the padding. "
                "Convert with zeros_in_front=False for masks."
            )
        if weight_queries is not None:
            self._check_rows(weight_queries, x)
        n, size = x.shape[1], getattr(self.method_heads.options, "num_landmarks", 1)
        front = -n % size if self.zeros_in_front else 0
        x = F.pad(x, (0, 0, front, 0)) if mask is None else torch.where(mask[..., None], x, 0.0)
        q, k, v = (split_heads(part, self.num_heads) for part in self.to_qkv(x).chunk(3, dim=-1))
        weight_places = None if weight_queries is None else weight_queries + front
        few = self._factors_of_few(q, k) if self.zeros_in_front and n + front == size else None

        def attend(v: Tensor, skip: Tensor | None) -> Tensor:
            if few is None:
                return self.method_heads(q, k, v, keep=mask, skip=skip)
            out = few[0] @ (few[1] @ v)
            return out if skip is None else depthwise_skip(v, skip, to=out)

        conv = getattr(self, "res_conv", None)
        out = self.to_out(merge_heads(attend(v, None) if conv is None else conv(v, attend=attend)))[:, front:]
        if weight_places is None:
            return out
        if few is None:
            weights = self.method_heads.rows(q, k, v, weight_places, Masks(mask))
        else:
            weights = few[0][:, :, weight_places] @ few[1]
        return out, weights[..., front:]

    def _check_rows(self, weight_queries: Tensor, x: Tensor) -> None:
        check_positions("weight_queries", weight_queries, x[:, None])
        if not METHODS[self.method_heads.method].rows:
            raise ValueError(f"weight_queries is given, but {self.method_heads.method} has no rows of weights to give.")
        if self.training and getattr(self.method_heads.options, "landmarks", None) == "uniform":
            raise ValueError(
                "weight_queries is given in training, where each call draws new landmarks: rows would come from other "
                "landmarks than the output. Call eval() first."
            )

    def _factors_of_few(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """One landmark per token: the package's formula for few tokens, where this library is exact."""
        a = (self.method_heads.head_dim**-0.5 * q @ k.mT).softmax(dim=-1)
        return a @ pinv(a, steps=self.method_heads.options.pinv_steps, z0="authors"), a


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks of torch, or a forward pass wrapped by hooks of accelerate."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks) or "forward" in vars(module)


def _as_skip(conv: nn.Module) -> DepthwiseSkip:
    """The package's convolution as a `DepthwiseSkip` with the same weight."""
    if type(conv) is not nn.Conv2d or has_hooks(conv):
        came = f"a {type(conv).__name__}" if type(conv) is not nn.Conv2d else "an nn.Conv2d with hooks"
        raise ValueError(
            f"res_conv is {came}, which a replacement would lose; expected a plain nn.Conv2d: leave it out of adapters "
            "and parametrizations, and add hooks and offloading after the replacement."
        )
    # The parameter made here is replaced: on "meta" it takes no random numbers.
    with torch.device("meta"):
        skip = DepthwiseSkip(conv.out_channels, conv.kernel_size[0])
    skip.weight = cast("nn.Parameter", conv.weight)
    return skip


def is_nystrom_attention(module: nn.Module) -> bool:
    """Whether a module is a `NystromAttention` of the package nystrom-attention."""
    kind = type(module)
    return kind.__name__ == "NystromAttention" and kind.__module__.partition(".")[0] == "nystrom_attention"


def from_nystrom_attention(
    module: nn.Module,
    method: str = "nystrom",
    options: Mapping[str, Any] | None = None,
    *,
    zeros_in_front: bool = False,
) -> NystromReplacement:
    """Replace a module of the package nystrom-attention by one of this library that shares its weights.

    The state dict has the same names (`to_qkv.weight`, `to_out.0.weight`, `to_out.0.bias`, `res_conv.weight`).

    Args:
        module: A `nystrom_attention.NystromAttention`.
        method: A method without learned weights, by its name in `nystrom.attention.registry.METHODS`.
        options: Options of the method; by default "nystrom" takes those of the module. Must be None with
            `zeros_in_front`.
        zeros_in_front: Reproduce the package's outputs: zeros in front of the tokens, to a multiple of the landmarks,
            count as real tokens. Without it, padding and the rest of the batch change nothing.

    Raises:
        ValueError: Any other module, an unknown method or option, or `zeros_in_front` with a method or options.
    """
    if not is_nystrom_attention(module):
        raise ValueError(
            f"module is a {type(module).__module__}.{type(module).__name__}; expected a NystromAttention of the "
            "package nystrom-attention. replace_attention finds those inside of a model."
        )
    check_weightless(method)
    check_flag("zeros_in_front", zeros_in_front)
    if zeros_in_front and (method != "nystrom" or options):
        came = f"options are {dict(options)}" if options else f"method is {method!r}"
        raise ValueError(
            f"zeros_in_front is True, the rule of the package's own module, and {came}: leave one of them out."
        )
    made = NystromReplacement(module, method, options or {}, zeros_in_front=zeros_in_front)
    return made.train(module.training)
