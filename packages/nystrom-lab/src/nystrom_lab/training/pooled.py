"""Measure the fixed values of `nystrom.models.parts.modern`."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn

from nystrom.evaluation import evaluating
from nystrom.models.parts.modern import pooled_norms


@torch.no_grad()
def measure_pooled(model: nn.Module, calls: Iterable[object]) -> None:
    """Set the fixed mean and variance of each norm of a model to those measured on its inputs.

    With several processes they are measured over all, which must call this together. A compiled model runs uncompiled.

    Args:
        model: The model; its mode is restored afterwards.
        calls: An iterable; each step runs the model once, in evaluation mode, on new sequences.

    Raises:
        ValueError: No sequence reached a norm.
    """
    norms = pooled_norms(model)
    # A compiled graph would not call the hooks.
    with evaluating(model), torch.compiler.set_stance("force_eager"):
        sums = [torch.zeros(3, norm.num_features, dtype=torch.float64) for norm in norms]
        hooks = [norm.register_forward_pre_hook(_adder(total)) for norm, total in zip(norms, sums, strict=True)]
        try:
            for _ in calls:
                pass
        finally:
            for hook in hooks:
                hook.remove()
    for norm, total in zip(norms, sums, strict=True):
        assert norm.running_mean is not None
        assert norm.running_var is not None
        total = total.to(norm.running_mean.device)
        if dist.is_initialized():
            dist.all_reduce(total)
        count, first, second = total
        if not count.all():
            raise ValueError("no sequence reached the norm of the pooled tokens: run the model in each call.")
        mean = first / count
        norm.running_mean.copy_(mean)
        norm.running_var.copy_((second / count - mean.square()).clamp(min=0))


def _adder(total: Float[Tensor, "3 w"]):
    def add(_: nn.Module, given: tuple[Tensor]) -> None:
        x = given[0].to("cpu", torch.float64)
        total.add_(torch.stack([torch.full_like(x[0], len(x)), x.sum(dim=0), x.square().sum(dim=0)]))

    return add
