"""The work around each method's computation: checks, dtypes, padding, empty inputs, the choice of kernels."""

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from nystrom.attention.backend import HAS_TRITON, check_backend_device
from nystrom.attention.group_runner import group_runner
from nystrom.attention.onnx_operator import onnx_operator, writes_onnx_loops
from nystrom.attention.position_bias import PositionBias, check_bias
from nystrom.attention.segments import check_segments, in_segments
from nystrom.attention.shared_graph import SHARED, as_node
from nystrom.native import keeps_loops
from nystrom.precision import cast_for_autocast, narrowed, without_autocast
from nystrom.private_torch import is_forward_mode, is_transformed, tracing_state
from nystrom.shapes import Group, Masks, check_inputs, check_same_tokens, is_number, zero_masked

# Compute capability of the GPUs that the kernels were measured on, an H100 and an H200.
_MEASURED_CAPABILITY = (9, 0)
_OF_TORCH = re.compile(r"forward (mode )?AD")
_PACKED = "cu_seqlens is given, and packed sequences attend to themselves: pass queries and keys of the same tokens"
# The message of `check_same_tokens` for a method without cross-attention.
SELF_ATTENTION = (
    "self-attention, of queries and keys of the same tokens: pass keep alone, or use 'nystrom' or 'softmax' for "
    "cross-attention"
)


def attend(
    core: Callable[..., Tensor],
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    v: Float[Tensor, "b h s e"],
    masks: Masks,
    *rest: Any,
    same_tokens: str | None = None,
    kernels: Callable[..., Tensor] | None = None,
    operator: Callable[..., Tensor] | None = None,
    onnx: str | None = None,
    group: Group = None,
) -> Float[Tensor, "b h n e"]:
    """Run `core(q, k, v, keep, query_keep, *rest)` on checked inputs, with the masks of keys and queries.

    The core sees padding tokens as zeros and the dtype that autocast asks for, with autocast switched off. The result
    is zeroed at padding queries and cast to the dtype of the values. With a `group`, `nystrom.parallel` runs the
    method.

    Args:
        *rest: Further arguments of the core.
        same_tokens: The message for a method that requires queries and keys of the same tokens, see
            `check_same_tokens`; None if they may differ.
        kernels: The computation by kernels, if `picks_triton` does with the options that `rest` begins with. It applies
            the masks itself, so that with backend="triton" nothing is done around it.
        operator: The core as one operator, for a compiler that keeps the loops, see `nystrom.attention.loops_operator`.
        onnx: The method, if an operator of onnxruntime computes this call, see `nystrom.attention.onnx_operator`.

    Raises:
        ValueError: Invalid shapes, dtypes or masks.
        NotImplementedError: A forward-mode derivative of a fused call is requested.
    """
    if group is not None:
        return group_runner().attend(group, q, k, v, masks, *rest, same_tokens=same_tokens)
    if masks.cu_seqlens is not None and masks.is_self and masks.keep is None:
        return _attend_in_segments(core, q, k, v, masks.cu_seqlens, *rest, same_tokens=same_tokens, kernels=kernels)
    keep, query_keep = check_inputs(q, k, v, masks)
    if same_tokens is not None:
        check_same_tokens(same_tokens, q, k, masks)
    for bias in _biases(rest):
        check_bias(bias, q)
    q, k, v = cast_for_autocast(q, k, v)
    if any(is_number(size) and size == 0 for size in (q.shape[0], q.shape[2], k.shape[2])):
        return empty_output(q, k, v, *_weights(rest))
    if onnx is not None and torch.compiler.is_exporting() and writes_onnx_loops():
        return onnx_operator(onnx, q, k, v, keep, query_keep, *rest)
    with without_autocast(q), _refusing_by_name():
        if kernels is not None and picks_triton(rest[0], q, k, v):
            core = kernels
            if rest[0].backend == "triton":
                check_backend_device("triton", q.device)
                return kernels(q, k, v, keep, query_keep, *rest)
        if operator is not None and core is not kernels and rest[0].backend != "triton" and keeps_loops(q, k, v):
            core = operator
        # A bias holds tensors of the model, which another trace cannot have.
        elif torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling() and not _biases(rest):
            noted = SHARED.get()
            core = core if noted is None else as_node(core, noted)
        dtype = v.dtype
        q, k, v = zero_masked(q, query_keep), zero_masked(k, keep), zero_masked(v, keep)
        return narrowed(zero_masked(core(q, k, v, keep, query_keep, *rest), query_keep), dtype)


def _attend_in_segments(
    core: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, *rest: Any, **how: Any
) -> Float[Tensor, "1 h n e"]:
    """Attend within each sequence of a packed batch; all use the same draws, as the sequences of a batch do."""
    check_inputs(q, k, v, Masks())
    check_same_tokens(_PACKED, q, k, Masks())
    for bias in _biases(rest):
        check_bias(bias, q)
    edges = check_segments(cu_seqlens, q)
    if not q.shape[2]:
        return empty_output(q, k, v, *_weights(rest))
    # The initial value "authors" depends on the whole batch, so each sequence gets a call of its own.
    alone = any(getattr(each, "z0", None) == "authors" for each in rest)
    drawing = next((each for each in rest if isinstance(each, torch.Generator)), None)
    state = None if drawing is None else drawing.get_state()

    # Coordinates are cut as the tokens are.
    places = [x.coordinates_of_tokens[:, None] for x in _biases(rest) if x.coordinates_of_tokens is not None]

    def attend_some(q: Tensor, k: Tensor, v: Tensor, *places: Tensor, keep: Tensor | None) -> Tensor:
        if drawing is not None and state is not None:
            drawing.set_state(state)
        own = [x.at(places[0][:, 0]) if places and isinstance(x, PositionBias) else x for x in rest]
        return attend(core, q, k, v, Masks(keep), *own, **how)

    return in_segments(attend_some, (q, k, v, *places), edges, alone=alone)


def _biases(rest: tuple[Any, ...]) -> list[PositionBias]:
    return [x for x in rest if isinstance(x, PositionBias)]


def _weights(rest: tuple[Any, ...]) -> list[Tensor]:
    return [*(x for x in rest if isinstance(x, Tensor)), *(x.weight for x in _biases(rest))]


def empty_output(
    q: Float[Tensor, "b h n d"], k: Float[Tensor, "b h s d"], v: Float[Tensor, "b h s e"], *weights: Tensor
) -> Float[Tensor, "b h n e"]:
    """Zeros, or an empty result: for an empty batch, no query, or no key to attend to."""
    zeros = v.new_zeros(*q.shape[:3], v.shape[-1])
    # Part of the graph, so that the backward pass also works through an empty batch.
    return zeros + sum(x.flatten()[:0].sum() for x in (q, k, v, *weights))


def picks_triton(options: Any, q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the kernels compute a call: with "triton", and with "auto" where they were measured to be faster.

    With "auto" that is in bfloat16 on a GPU of compute capability 9.0, for widths of heads up to `measured_width` of
    the options (0 if these were not measured), outside of exports, of transforms of torch.func and of forward mode.
    Neither lengths nor masks matter: the same code computes a sequence however it is padded. A compiler takes the same
    choice, for the same bits. The queries come in the dtype that they are computed in.
    """
    if options.backend != "auto" or not HAS_TRITON:
        return options.backend == "triton"
    if max(q.shape[-1], v.shape[-1]) > options.measured_width or not _is_measured(q.device):
        return False
    # An exported model runs elsewhere, where the operators of the kernels may not be registered.
    if torch.compiler.is_exporting() or is_transformed() or is_forward_mode():
        return False
    return all(x.device == q.device and x.dtype == torch.bfloat16 for x in (q, k, v))


def _is_measured(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    from nystrom.gpu.launch import capability_of, check_device

    try:
        check_device(device)
    except ValueError:
        # An older Triton, for example: "auto" is no explicit choice.
        return False
    # On ROCm, too, the device is "cuda".
    return bool(torch.version.cuda) and capability_of(device) == _MEASURED_CAPABILITY


def _refusing_by_name() -> AbstractContextManager[None]:
    """Context in which an operation that forward mode or `torch.jit.trace` cannot take names alternatives."""
    return nullcontext() if torch.compiler.is_compiling() else _refusing()


@contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except NotImplementedError as error:
        if not _OF_TORCH.search(str(error)):
            raise
        raise NotImplementedError(
            "this attention is made of fused calls, which have no derivative in forward mode (torch.func.jvp, jacfwd, "
            "hessian): use reverse mode, such as torch.func.vjp or jacrev, or a method with second derivatives (see "
            "`nystrom methods`)."
        ) from error
    except (AssertionError, TypeError, ValueError) as error:
        if tracing_state() is None:
            raise
        raise NotImplementedError(
            "torch.jit.trace, for which lengths are tensors, does not support this attention: use torch.export or "
            "torch.compile."
        ) from error
