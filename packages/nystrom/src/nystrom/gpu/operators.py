"""How passes by kernels become part of torch: operators for compilers and export, functions of autograd elsewhere.

Under vmap, the functions run one slice at a time. There is no second derivative and no forward-mode derivative: asking
for one raises.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from nystrom.private_torch import is_forward_mode, is_transformed, without_ended_transform


class Differentiable(NamedTuple):
    """A forward pass with a gradient, as a function."""

    call: Callable[..., Tensor]  # Calls it
    # For other functions of autograd that compute the same: saves, in the context of one, the tensors and numbers of
    # such a call, and its results
    keep: Callable[..., None]
    # The `backward` of a function that kept them, whose first inputs are the tensors with gradients
    differentiate: Callable[..., Any]

    def __call__(self, *inputs: Any) -> Tensor:
        """The output."""
        return self.call(*inputs)


def differentiable(
    name: str, forward: Callable[..., tuple[Tensor, Tensor]], backward: Callable[..., tuple[Tensor, ...]],
    fakes: tuple[Callable[..., Any], Callable[..., Any]], *, tensors: int, needs_output: bool
) -> Differentiable:  # fmt: skip
    """The function that calls a forward pass, with the backward pass as its gradient.

    Args:
        name: Name of the operator; that of the backward pass ends in "_backward".
        forward: Takes tensors and then numbers; returns the output, and what the backward pass needs.
        backward: Takes the gradient of the output, the tensors, the output if it `needs_output`, what is kept and the
            numbers; returns the gradients of the first tensors.
        fakes: The same for tensors without numbers.
        tensors: Number of tensors.
    """
    operator = torch.library.custom_op(f"nystrom::{name}", forward, mutates_args=())
    operator_backward = torch.library.custom_op(f"nystrom::{name}_backward", backward, mutates_args=())
    operator.register_fake(fakes[0])
    operator_backward.register_fake(fakes[1])

    def keep(ctx, inputs, output) -> None:
        # Else what is kept gets a gradient of zeros, which is written at each call.
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:tensors], *output[not needs_output :])
        ctx.numbers = inputs[tensors:]

    def differentiate(ctx, grad, *_):
        if grad is None:
            return (None,) * (tensors + len(ctx.numbers))
        # A function that torch.func.vjp returned runs after its transform, whose wrappers have no memory.
        given = (grad, *(None if x is None else without_ended_transform(x) for x in ctx.saved_tensors))
        gradients = _way(operator_backward, Gradients, PlainGradients, backward, given)(*given, *ctx.numbers)
        # Operators return tensors, also where none was given.
        of_tensors = (None if x is None else of_x for x, of_x in zip(given[1:], gradients, strict=False))
        return *of_tensors, *(None,) * (tensors + len(ctx.numbers) - len(gradients))

    class Plain(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            output = forward(*inputs)
            keep(ctx, inputs, output)
            return output

        backward = staticmethod(differentiate)  # pyright: ignore[reportAssignmentType]

    class Transformed(torch.autograd.Function):
        """The operator in the form that torch.func needs."""

        forward = staticmethod(lambda *inputs: forward(*inputs))
        setup_context = staticmethod(keep)
        backward = staticmethod(differentiate)  # pyright: ignore[reportAssignmentType]
        vmap = staticmethod(lambda info, in_dims, *inputs: one_by_one(Transformed, info, in_dims, inputs))

    class PlainGradients(torch.autograd.Function):
        forward = staticmethod(lambda ctx, *inputs: backward(*inputs))
        backward = staticmethod(_refuse_second)

    class Gradients(torch.autograd.Function):
        forward = staticmethod(lambda *inputs: backward(*inputs))
        setup_context = staticmethod(lambda ctx, inputs, output: None)
        backward = staticmethod(_refuse_second)
        vmap = staticmethod(lambda info, in_dims, *inputs: one_by_one(Gradients, info, in_dims, inputs))

    operator.register_autograd(differentiate, setup_context=keep)

    def call(*inputs: Any) -> Tensor:
        given = inputs[:tensors]
        if is_forward_mode() and any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in given):
            raise NotImplementedError(
                "backend 'triton' has no derivative in forward mode, as torch's fused calls have none: use reverse "
                "mode, such as torch.func.vjp or jacrev, or a method with second derivatives (see `nystrom methods`)."
            )
        return _way(operator, Transformed, Plain, forward, given)(*inputs)[0]

    return Differentiable(call, keep, differentiate)


def _way(operator, transformed, plain, alone, given):
    """The operator under a compiler, and outside one a function of autograd, where it is needed."""
    if torch.compiler.is_compiling():
        return operator
    if is_transformed():
        return transformed.apply
    needed = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given)
    return plain.apply if needed else alone


def one_by_one(function, info, in_dims, inputs):
    """Apply a function to each slice of a vmap, and stack the results."""
    results = [
        function.apply(*(x if dim is None else x.select(dim, i) for x, dim in zip(inputs, in_dims, strict=True)))
        for i in range(info.batch_size)
    ]
    stacked = tuple(torch.stack(parts) for parts in zip(*results, strict=True))
    return stacked, (0,) * len(stacked)


def _refuse_second(ctx, *gradients) -> NoReturn:
    raise NotImplementedError(
        "backend 'triton' has no second derivative, as torch's fused calls have none: use a method with second "
        "derivatives (see `nystrom methods`)."
    )
