"""The Module of every method, on tensors split into heads: its function, its options, and its weights, if any."""

from dataclasses import asdict, fields
from functools import partial
from typing import Any

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from nystrom.attention.exact_heads import attend_in_two, exact_attention, exact_rows
from nystrom.attention.functions import FUNCTIONS, ROWS, WEIGHTS
from nystrom.attention.group_runner import group_runner
from nystrom.attention.options import check_exact_heads, refusing
from nystrom.attention.position_bias import PositionBias, as_bias, check_bias
from nystrom.attention.registry import METHODS, check_takes_bias
from nystrom.attention.segments import check_segments, in_segments
from nystrom.attention.skip import NEEDS_SAME_TOKENS, check_kernel, depthwise_skip
from nystrom.checks import check_at_least, check_names
from nystrom.shapes import Group, Masks, check_same_tokens, check_tensor


class AttentionHeads(nn.Module):
    """A method over (b, h, n, d).

    In training, random methods draw from torch's global generator; in evaluation their draws are spread evenly.

    Attributes:
        method: Name of the method.
        options: Options of the method.
        weights: Module that supplies the function's tensor arguments after the values; None for most methods. The
            function runs in its call, around which hooks bring, gather or cast weights.
        group: Process group across which the tokens are split, see `nystrom.parallel`; None for a single process.
    """

    def __init__(self, method: str, options: Any, num_heads: int, head_dim: int):
        super().__init__()
        entry = METHODS[method]
        self.method, self.options = method, options
        self.num_heads, self.head_dim = num_heads, head_dim
        self.group: Group = None
        self.weights = WEIGHTS[method](num_heads, head_dim, options) if entry.weights else None
        self._function = FUNCTIONS[method]
        self._arguments = {key: value for key, value in asdict(options).items() if key not in entry.weight_options}
        self._exact_heads: tuple[int, ...] = self._arguments.pop("exact_heads", ())
        check_exact_heads(self._exact_heads, num_heads)
        # Weights of random features are drawn by their own Module.
        self._random = entry.random and self.weights is None
        # The error that a tolerance bounds is that of attention alone.
        self._takes_skip = entry.takes_skip and getattr(options, "tolerance", None) is None

    @refusing
    def forward(
        self,
        q: Float[Tensor, "b h n d"],
        k: Float[Tensor, "b h s d"],
        v: Float[Tensor, "b h s e"],
        *,
        keep: Bool[Tensor, "b n"] | None = None,
        key_keep: Bool[Tensor, "b s"] | None = None,
        query_keep: Bool[Tensor, "b n"] | None = None,
        cu_seqlens: Int[Tensor, " ends"] | None = None,
        skip: Float[Tensor, "h 1 taps 1"] | None = None,
        is_causal: bool = False,
        bias: PositionBias | None = None,
    ) -> Float[Tensor, "b h n e"]:
        """Attend. The arguments are those of the method's function.

        Args:
            skip: Kernel of the skip convolution of the values, which is added to the output, see `depthwise_skip`;
                self-attention only.

        Raises:
            ValueError: Invalid shapes, dtypes or masks, or heads whose number or width differs from those that the
                Module was built for.
        """
        check_tensor("q", q)
        heads, width = (q.shape[1], q.shape[3]) if q.ndim == 4 else (0, 0)
        if heads and width and (heads, width) != (self.num_heads, self.head_dim):
            raise ValueError(
                f"q has shape {tuple(q.shape)}: {heads} heads of width {width}; expected {self.num_heads} of "
                f"width {self.head_dim}, for which this attention was built."
            )
        if is_causal:
            self._check_causal(skip)
        if bias is not None:
            check_takes_bias(self.method)
            if q.ndim == 4:
                check_bias(as_bias(bias), q)
        masks, scale = Masks(keep, key_keep, query_keep, cu_seqlens), self._arguments.get("scale")

        def exact(heads: list[int], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            own = None if bias is None else bias.of_heads(heads)
            out = exact_attention(q, k, v, masks, scale=scale, is_causal=is_causal, group=self.group, bias=own)
            return out if skip is None else self._add_skip(out, q, k, v, skip[heads], masks)

        def method(heads: list[int] | slice, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            own = None if bias is None else bias.of_heads(heads)
            return self._by_method(q, k, v, masks, None if skip is None else skip[heads], is_causal, own)

        return attend_in_two(self._exact_heads, exact, method, q, k, v)

    def _by_method(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        masks: Masks,
        skip: Tensor | None,
        is_causal: bool,
        bias: PositionBias | None,
    ) -> Float[Tensor, "b h n e"]:
        arguments = dict(self._arguments)
        if bias is not None:
            arguments["bias"] = bias
        if is_causal:
            arguments["is_causal"] = True
        if self._random and self.training:
            arguments["generator"] = "global"
        if self._takes_skip:
            arguments["skip"] = skip
        attend = partial(self._function, q, k, v, **masks._asdict(), group=self.group, **arguments)
        out = attend() if self.weights is None else self.weights(attend)
        return out if skip is None or self._takes_skip else self._add_skip(out, q, k, v, skip, masks)

    def _add_skip(
        self, out: Tensor, q: Tensor, k: Tensor, v: Tensor, skip: Tensor, masks: Masks
    ) -> Float[Tensor, "b h n e"]:
        if self.group is not None:
            return group_runner().add_skip(self.group, v, skip, q, masks, out)
        check_kernel(v, skip)
        check_same_tokens(NEEDS_SAME_TOKENS, q, k, masks)
        return add_skip(out, v, skip, masks)

    def rows(
        self,
        q: Float[Tensor, "b h n d"],
        k: Float[Tensor, "b h s d"],
        v: Float[Tensor, "b h s e"],
        queries: Int[Tensor, " r"],
        masks: Masks,
    ) -> Float[Tensor, "b h r s"]:
        """Rows of the attention matrix of a method that has them, for the queries at these positions."""
        options = {name: value for name, value in self._arguments.items() if name != "backend"}
        # Values decide which keys a block selects.
        values = (v,) if options.get("num_selected") else ()

        def exact(_: object, q: Tensor, k: Tensor, *values: Tensor) -> Tensor:
            return exact_rows(q, k, queries, masks, scale=self._arguments["scale"])

        def method(_: object, q: Tensor, k: Tensor, *values: Tensor) -> Tensor:
            more = {"v": values[0]} if values else {}
            return ROWS[self.method](q, k, queries, **masks._asdict(), **options, **more)

        return attend_in_two(self._exact_heads, exact, method, q, k, *values)

    def _check_causal(self, skip: Tensor | None) -> None:
        if not METHODS[self.method].causal:
            raise ValueError(
                f"is_causal cannot be honoured: {self.method} attention sees the whole sequence. Use "
                "method='near_far', or nn.MultiheadAttention."
            )
        if skip is not None:
            raise ValueError(
                "is_causal is True, and the skip convolution adds the values of later tokens: build the layer with "
                "conv_kernel_size=None."
            )

    def extra_repr(self) -> str:
        """Method and options, shown by print."""
        return describe(self.method, self.options)


def add_skip(out: Tensor, v: Tensor, skip: Tensor, masks: Masks) -> Float[Tensor, "b h n e"]:
    """Add the convolution of the values; packed sequences are convolved separately."""
    if masks.cu_seqlens is None:
        return depthwise_skip(v, skip, keep=masks.keep, to=out)

    def convolve(v: Tensor, out: Tensor, *, keep: Tensor | None) -> Tensor:
        return depthwise_skip(v, skip, keep=keep, to=out)

    return in_segments(convolve, (v, out), check_segments(masks.cu_seqlens, v)) if v.shape[2] else out


def describe(method: str, options: Any) -> str:
    """A method and its non-default options, shown by print."""
    changed = {field.name: getattr(options, field.name) for field in fields(options)}
    changed = {name: value for name, value in changed.items() if value != getattr(type(options)(), name)}
    return ", ".join([f"method={method!r}", *(f"{name}={value!r}" for name, value in changed.items())])


def build_attention(name: str, *, num_heads: int, head_dim: int, **options: Any) -> AttentionHeads:
    """Build the Module of a method: its `forward(q, k, v, *, keep=None, ...)` gives (b, h, n, e).

    Args:
        name: A key of `nystrom.attention.registry.METHODS`.
        num_heads: Heads h.
        head_dim: Width d of a query or key in one head.
        **options: Fields of the method's options dataclass.

    Raises:
        ValueError: An unknown method or option, or an invalid value.
    """
    check_at_least("num_heads", num_heads, 1)
    check_at_least("head_dim", head_dim, 1)
    check_names("attention method", [name], METHODS)
    kind = METHODS[name].options
    check_names(f"option of {name}", options, {field.name for field in fields(kind)})
    return AttentionHeads(name, kind(**options), num_heads, head_dim)


def split_heads(x: Float[Tensor, "b n w"], num_heads: int) -> Float[Tensor, "b h n d"]:
    """Split the width into heads, as a view: consecutive tokens of a head are `num_heads` rows apart."""
    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def merge_heads(x: Float[Tensor, "b h n e"]) -> Float[Tensor, "b n w"]:
    """Put the heads side by side again."""
    return x.transpose(1, 2).flatten(2)


def attend_in_heads(
    heads: AttentionHeads,
    q: Float[Tensor, "b n w"],
    k: Float[Tensor, "b s w"],
    v: Float[Tensor, "b s x"],
    *,
    masks: Masks,
    conv: nn.Module | None = None,
    is_causal: bool = False,
    bias: PositionBias | None = None,
) -> Float[Tensor, "b n x"]:
    """Split projected tokens into heads, attend, add the skip convolution of the values if there is one, and merge.

    Raises:
        ValueError: Invalid shapes, dtypes or masks.
    """
    q, k, v = (split_heads(x, heads.num_heads) for x in (q, k, v))

    def attend(v: Tensor, skip: Tensor | None) -> Tensor:
        return heads(q, k, v, **masks._asdict(), skip=skip, is_causal=is_causal, bias=bias)

    return merge_heads(attend(v, None) if conv is None else conv(v, attend=attend))
