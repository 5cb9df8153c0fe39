"""The letters used in shapes throughout this library, and the checks that all methods share.

| letter | axis |
|---|---|
| `b` | batch |
| `h` | heads |
| `n` | queries |
| `s` | keys and values (`s == n` in self-attention) |
| `m` | landmarks |
| `d` | width of a query or key in one head |
| `e` | width of a value in one head |

The axes of queries, keys and values are (b, h, n, d), as in torch's `scaled_dot_product_attention`. Tensors (b, n,
h, d), as xformers and flash-attn have them, cannot be told apart unless a mask contradicts the shape: transpose(1, 2).

A mask is boolean, True = real token (False = padding), and its name declares self- or cross-attention, see `Masks`. The
checks raise an error for what no method supports, such as an n x s mask or bias, and name it.

Docstrings of functions that users do not call leave out what these mean everywhere: `keep`, `key_keep` and
`query_keep` (None if all are real), `scale` (of the scores), `group` and `ranks` (over which tokens are split),
`options` (of the method) and `m`.
"""

from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from nystrom.precision import is_autocast
from nystrom.private_torch import FakeTensor, assert_in_graph

# The source of a method's draws: None spreads them evenly, "global" is torch's global generator.
Generator = torch.Generator | Literal["global"] | None
# A torch.distributed.ProcessGroup, or a DeviceMesh of one dimension; not every build of torch has them.
Group = Any

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Masks(NamedTuple):
    """Which tokens are real, as declared by the caller; neither lengths nor the identity of tensors decide it."""

    keep: Tensor | None = None  # Real tokens (b, n) of self-attention, of queries and keys alike; None if all are
    key_keep: Tensor | None = None  # Real keys (b, s) of cross-attention; None if all are
    query_keep: Tensor | None = None  # Real queries (b, n) of cross-attention; None if all are
    # Start of each packed sequence, and the end of the last, see `nystrom.attention.segments`. Each is self-attention
    # of real tokens. None if each row of the batch is one sequence.
    cu_seqlens: Tensor | None = None

    @property
    def is_self(self) -> bool:
        """Whether queries and keys are the same tokens; a mask of only one side declares that they are not."""
        return self.key_keep is None and self.query_keep is None

    def settled(self) -> tuple[Tensor | None, Tensor | None]:
        """The masks of keys and queries, None if all are real; the same object in self-attention."""
        return (self.keep, self.keep) if self.is_self else (self.key_keep, self.query_keep)


def is_number(size: int) -> bool:
    """Whether the size of an axis is a number, not one of a range that a compiler or an export works for."""
    if torch.compiler.is_exporting() and torch.compiler.is_dynamo_compiling():
        # In a strict export `isinstance` takes a symbolic size for a number.
        from torch.fx.experimental.symbolic_shapes import has_static_value

        return has_static_value(size)
    return isinstance(size, int)


def has_numbers(x: Tensor) -> bool:
    """Whether a tensor holds numbers that may be looked at: not on the meta device, nor in FakeTensorMode."""
    return not (x.is_meta or isinstance(x, FakeTensor))


def cross_masks(k: Tensor, key_keep: Tensor | None, query_keep: Tensor | None, *, declared: bool) -> Masks:
    """Masks of cross-attention, of keys (b, h, s, d) or (b, s, width).

    A mask of the keys is created if there is none and it must be `declared`, since the method depends on positions.
    """
    if declared and key_keep is None and query_keep is None:
        key_keep = torch.ones(k.shape[0], k.shape[-2], dtype=torch.bool, device=k.device)
    return Masks(key_keep=key_keep, query_keep=query_keep)


def check_inputs(q: Tensor, k: Tensor, v: Tensor, masks: Masks) -> tuple[Tensor | None, Tensor | None]:
    """Check the inputs of attention; the masks of keys and queries, the same object in self-attention.

    Raises:
        ValueError: A rank, width, count, dtype or device that does not match, or masks that declare both self- and
            cross-attention; the message names it.
    """
    for name, x, letters in (("q", q, "(b, h, n, d)"), ("k", k, "(b, h, s, d)"), ("v", v, "(b, h, s, e)")):
        check_tensor(name, x)
        if x.ndim != 4:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; expected four axes {letters}: split the heads first.")
        if x.dtype not in _DTYPES:
            raise ValueError(f"{name} has dtype {x.dtype}; expected float32, bfloat16, float16 or float64.")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device} but q is on {q.device}: move them to one device.")
        # Autocast leaves float64 alone.
        if x.dtype != q.dtype and (not is_autocast(q.device.type) or torch.float64 in (x.dtype, q.dtype)):
            raise ValueError(f"{name} has dtype {x.dtype} but q has {q.dtype}: cast them to one dtype.")
        if x.shape[:2] != q.shape[:2]:
            raise ValueError(
                f"{name} has (batch, heads) = {tuple(x.shape[:2])} but q has {tuple(q.shape[:2])}: "
                "repeat grouped heads before the call."
            )
        for axis, size in (("heads", x.shape[1]), ("width", x.shape[3])):
            if is_number(size) and size == 0:
                raise ValueError(f"{name} has shape {tuple(x.shape)}: its {axis} axis is empty; expected at least 1.")
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"k has head width {k.shape[-1]} but q has {q.shape[-1]}; expected the same width.")
    if v.shape[-2] != k.shape[-2]:
        raise ValueError(f"v holds {v.shape[-2]} tokens but k holds {k.shape[-2]}: pass one value per key.")
    keep, key_keep, query_keep, cu_seqlens = masks
    if cu_seqlens is not None:
        given = [name for name, mask in masks._asdict().items() if mask is not None and name != "cu_seqlens"]
        raise ValueError(
            f"cu_seqlens is given, and {given[0]}: packed sequences have no padding. Leave one of them out."
            if given
            else "cu_seqlens is given, but this takes one sequence: pass the sequences one by one."
        )
    if keep is None:
        check_keep("key_keep", key_keep, k, "k")
        check_keep("query_keep", query_keep, q, "q")
        return masks.settled()
    if not masks.is_self:
        raise ValueError(
            f"keep is given, and so is {'key_keep' if query_keep is None else 'query_keep'}: pass keep alone for "
            "self-attention, or key_keep and query_keep for cross-attention."
        )
    check_keep("keep", keep, q, "q")
    if q.shape[2] != k.shape[2]:
        raise ValueError(
            f"keep is given for {q.shape[2]} queries and {k.shape[2]} keys, but it masks queries and keys of the "
            "same tokens alike: pass key_keep (and query_keep) for cross-attention."
        )
    return masks.settled()


def check_tensor(name: str, x: object) -> None:
    """Raise if an argument is not a dense tensor."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} is a {type(x).__name__}; expected a tensor.")
    if x.is_nested:
        raise ValueError(
            f"{name} is a nested tensor; expected a dense one: pad it (torch.nested.to_padded_tensor) and mark the "
            "real tokens by a mask. nn.TransformerEncoder makes no nested tensors if encoder.use_nested_tensor = False."
        )
    if x.layout != torch.strided:
        raise ValueError(f"{name} has the layout {x.layout}; expected a dense tensor: x.to_dense().")


def check_same_tokens(rule: str, q: Tensor, k: Tensor, masks: Masks) -> None:
    """Raise ValueError for cross-attention, or different numbers of queries and keys, with the rule of the method.

    The rule says what to do instead, such as "longformer is self-attention: use nystrom".
    """
    if not masks.is_self:
        came = "key_keep is given" if masks.query_keep is None else "query_keep is given"
    elif q.shape[2] != k.shape[2]:
        came = f"q holds {q.shape[2]} tokens and k holds {k.shape[2]}"
    else:
        return
    raise ValueError(f"{came}, but {rule}.")


def check_keep(name: str, keep: Tensor | None, x: Tensor, of: str) -> None:
    """Check that a mask holds one boolean per token of `x`."""
    if keep is None:
        return
    if not isinstance(keep, Tensor) or keep.dtype != torch.bool:
        came = keep.dtype if isinstance(keep, Tensor) else type(keep).__name__
        raise ValueError(
            f"{name} has dtype {came}; expected torch.bool with True = real token ({name}.bool() if it is 0/1, "
            f"{name} == 0 if it is additive, of 0 and -inf)."
        )
    if keep.ndim != 2:
        way_out = row_per_token(name, keep, x) or (
            "An n x s mask cannot be honoured in linear memory: for a causal one use near_far with is_causal=True, for "
            "others torch.nn.functional.scaled_dot_product_attention."
        )
        raise ValueError(f"{name} has shape {tuple(keep.shape)}; expected (batch, tokens). {way_out}")
    if keep.shape[0] != x.shape[0] or keep.shape[1] != x.shape[-2]:
        swapped = x.ndim == 4 and tuple(keep.shape) == tuple(x.shape[:2])
        hint = f", or {of}.transpose(1, 2) if its axes are (batch, tokens, heads, width)" if swapped else ""
        raise ValueError(
            f"{name} has shape {tuple(keep.shape)} but {of} holds {x.shape[0]} x {x.shape[-2]} tokens: "
            f"pass one boolean per token{hint}."
        )
    if keep.device != x.device:
        raise ValueError(f"{name} is on {keep.device} but {of} is on {x.device}: move it there.")


def row_per_token(name: str, mask: Tensor, x: Tensor) -> str:
    """The sentence that gives a mask of tokens in another form, such as (b, 1, 1, n) or (n), the shape (b, n).

    "" if it is no mask of the tokens x (b, ..., n, width).
    """
    b, n = x.shape[0], x.shape[-2]
    axes = [size for size in mask.shape if size != 1]
    if axes == [size for size in (b, n) if size != 1]:
        return f"It has one value per token: pass {name}.reshape({b}, {n})."
    return f"It has one value per position: pass {name}.reshape(1, {n}).expand({b}, {n})." if axes == [n] else ""


def check_weight_device(name: str, weight: Tensor, x: Tensor) -> None:
    """Raise if a weight is not where the tokens are; a product with one on "meta" may give whatever memory holds."""
    if weight.device != x.device:
        raise ValueError(
            f"{name} is on {weight.device} but the tokens are on {x.device}: move it there. Weights that are offloaded "
            "are brought by hooks of their module, and only while it is called."
        )


def check_generator(generator: object) -> None:
    """Raise if an argument is not a source of draws, see `Generator`."""
    if generator is not None and generator != "global" and not isinstance(generator, torch.Generator):
        raise ValueError(f"generator is {generator!r}; expected None, 'global' or a torch.Generator.")


def check_positions(name: str, positions: Tensor, x: Tensor) -> None:
    """Check positions of tokens of `x`: one axis of integers, on its device, within its tokens."""
    check_tensor(name, positions)
    if positions.device != x.device:
        raise ValueError(f"{name} is on {positions.device}, the tokens are on {x.device}: move it there.")
    if positions.ndim != 1 or positions.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"{name} is {tuple(positions.shape)} of {positions.dtype}; expected one axis of integer positions."
        )
    inside, message = ((positions >= 0) & (positions < x.shape[2])).all(), f"{name} holds positions outside the tokens."
    if torch.compiler.is_compiling():
        # A compiled graph cannot branch on values: it raises this as a RuntimeError when it runs.
        assert_in_graph(inside, message)
    elif has_numbers(positions) and not inside:
        raise ValueError(f"{name} holds positions outside 0 ... {x.shape[2] - 1}.")


def score_scale(q: Tensor, scale: float | None) -> float:
    """The factor on the scores: 1 / sqrt(d) unless given."""
    # A trace of torch.jit has sizes as tensors, whose power would be rounded to float32.
    return torch.sym_float(q.shape[-1]) ** -0.5 if scale is None else scale


def zero_masked(x: Float[Tensor, "b h n d"], keep: Bool[Tensor, "b n"] | None) -> Float[Tensor, "b h n d"]:
    """Zero the padding tokens, so that neither their values nor their gradients, even NaN, propagate."""
    return x if keep is None else torch.where(keep[:, None, :, None], x, 0.0)


def cut_blocks(x: Shaped[Tensor, "b t *d"], size: int) -> Shaped[Tensor, "b l c *d"]:
    """Cut a whole number of blocks, one after the other.

    If the length is symbolic, they are cut as windows: a view would need to know whether the block size divides it.
    """
    return x.unflatten(1, (-1, size)) if is_number(x.shape[1]) else x.unfold(1, size, size).movedim(-1, 2)
