"""A method on a CPU as one operator of a compiled graph, so that a compiler keeps the loops of `nystrom.native`.

A compiler would trace the plain form of a method, which is slower. One operator runs the method as in a plain call:
by loops, in stretches, and with branches on masks. The backward pass computes the method once more, with a graph. An
export has the plain form: it runs elsewhere, where the operator is not known.
"""

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from nystrom.attention.options import LayerOptions
from nystrom.private_torch import with_autograd

_OF_LAYERS = {field.name for field in fields(LayerOptions)}


def loops_operator(name: str, core: Callable[..., Tensor], options: type) -> Callable[..., Tensor]:
    """The core of a method, see `nystrom.attention.entry.attend`, as an operator of torch.

    The further arguments are options of this class, then literals and at most one tensor, which has a gradient.
    """
    names = [field.name for field in fields(options) if field.name not in _OF_LAYERS]

    def settled(weight: Tensor | None, words: str, sizes: Sequence[int], factors: Sequence[float]) -> list[Any]:
        """The further arguments of the core."""
        given: dict[str, Iterator[Any]] = {"int": iter(sizes), "float": iter(factors), "tensor": iter([weight])}
        values = [next(given[word]) if word in given else ast.literal_eval(word) for word in words.split()]
        return [options(**dict(zip(names, values, strict=False))), *values[len(names) :]]

    def run(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        keep: Tensor | None,
        query_keep: Tensor | None,
        weight: Tensor | None,
        *given: Any,
    ) -> Tensor:
        return core(q, k, v, keep, query_keep, *settled(weight, *given))

    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        keep: Tensor | None,
        query_keep: Tensor | None,
        weight: Tensor | None,
        words: str,
        sizes: Sequence[int],
        factors: Sequence[float],
    ) -> Tensor:
        return _side_by_side(run(q, k, v, keep, query_keep, weight, words, sizes, factors))

    def backward(
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        keep: Tensor | None,
        query_keep: Tensor | None,
        weight: Tensor | None,
        words: str,
        sizes: Sequence[int],
        factors: Sequence[float],
    ) -> list[Tensor]:
        with with_autograd():
            q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
            weight = None if weight is None else weight.detach().requires_grad_()
            out = run(q, k, v, keep, query_keep, weight, words, sizes, factors)
            leaves = [x for x in (q, k, v, weight) if x is not None]
            gradients = torch.autograd.grad(out, leaves, grad, materialize_grads=True)
        return [*(_side_by_side(x) for x in gradients[:3]), *(x.contiguous() for x in gradients[3:])]

    operator = torch.library.custom_op(f"nystrom::{name}_by_loops", forward, mutates_args=())
    operator_backward = torch.library.custom_op(f"nystrom::{name}_by_loops_backward", backward, mutates_args=())

    @operator.register_fake
    def _(q, k, v, keep, query_keep, weight, words, sizes, factors):
        return _room(q, v.shape[3])

    @operator_backward.register_fake
    def _(grad, q, k, v, keep, query_keep, weight, words, sizes, factors):
        rooms = [_room(x, x.shape[3]) for x in (q, k, v)]
        return rooms if weight is None else [*rooms, weight.new_empty(weight.shape)]

    def keep_inputs(ctx, inputs, output) -> None:
        tensors, ctx.settings = inputs[:6], inputs[6:]
        ctx.save_for_backward(*tensors)

    def differentiate(ctx, grad):
        of_q, of_k, of_v, *of_weight = operator_backward(grad, *ctx.saved_tensors, *ctx.settings)
        return of_q, of_k, of_v, None, None, *(of_weight or (None,)), None, None, None

    operator.register_autograd(differentiate, setup_context=keep_inputs)

    def call(
        q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, query_keep: Tensor | None, given: Any, *rest: Any
    ) -> Tensor:
        weight = next((x for x in rest if isinstance(x, Tensor)), None)
        values = [*(getattr(given, each) for each in names), *rest]
        # Pass words and numbers: a graph may be kept for another process, which knows no object of this one. A compiler
        # may have numbers as symbols, which no text holds.
        words = " ".join([_word(x) for x in values])
        sizes, factors = ([x for x in values if _word(x) == kind] for kind in ("int", "float"))
        return operator(q, k, v, keep, query_keep, weight, words, sizes, factors)

    return call


def _word(x: Any) -> str:
    """The kind of a number or tensor, or what else is written as Python has it."""
    if isinstance(x, Tensor):
        return "tensor"
    if isinstance(x, int | float) and not isinstance(x, bool):
        return "int" if isinstance(x, int) else "float"
    return f"{x!r}"


def _room(x: Tensor, width: int) -> Tensor:
    """Memory for (b, h, n, width) where a model puts the heads side by side again."""
    return x.new_empty(x.shape[0], x.shape[2], x.shape[1], width).transpose(1, 2)


def _side_by_side(x: Tensor) -> Tensor:
    """The tensor, in the layout of `_room`."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)
