r"""How much of the error of a model's hidden states each head makes, from one backward pass for each text.

The model runs with a method in each layer. With its hidden states $\hat H$, those of exact attention H, the output
$\hat O$ of a head, and the output O that exact attention gives for the same queries, keys and values,
$$\mathrm{effect} = \Big\langle \frac{\partial}{\partial \hat O} \tfrac12 \|\hat H - H\|_F^2,\; \hat O - O \Big\rangle
/ \|H\|_F^2 .$$
To first order the effects add up to the squared relative error, and a head whose error is uncorrelated with the others'
takes its effect away if it attends exactly. A head's own error says little: where the layers above read nothing of it,
it changes nothing. Effects hold near the model that they were taken of: once the heads of large errors are exact, those
of the others may be quite different.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from nystrom.inspection.candidates import EXACT, Candidate
from nystrom.inspection.whole_model import Batch, Results, run_model
from nystrom.integrations.layer_calls import LayerCall, attend_by, intercepted


def head_effects(
    model: nn.Module,
    batches: Sequence[Batch],
    exact: Sequence[Results],
    choice: Mapping[int | None, Candidate],
    tick: Callable[[], object] = lambda: None,
) -> dict[int, Float[Tensor, " h"]]:
    """The effect of each head by the number of its layer, over all texts.

    Args:
        model: In evaluation mode.
        exact: Results of the model for the batches with exact attention.
        choice: The method of each layer by its number; under None that of all others.
        tick: Is called after each batch.
    """
    size = sum(float(each.hidden.double().square().sum()) for each in exact)
    effects: dict[int, Tensor] = {}
    for batch, wanted in zip(batches, exact, strict=True):
        for layer, effect in _of_batch(model, batch, wanted, choice).items():
            effects[layer] = effects.get(layer, 0.0) + effect / size
        tick()
    return effects


def _of_batch(
    model: nn.Module, batch: Batch, wanted: Results, choice: Mapping[int | None, Candidate]
) -> dict[int, Tensor]:
    outputs: dict[int, Tensor] = {}
    errors: dict[int, Tensor] = {}

    def attend(call: LayerCall) -> Tensor:
        candidate = choice.get(call.layer, choice[None])
        out = attend_by(candidate.method, call, candidate.options)
        if not out.requires_grad:
            # The first layer of a model with frozen weights.
            out = out.detach().requires_grad_()
        with torch.no_grad():
            errors[call.layer] = out - attend_by(EXACT, call, {})
        outputs[call.layer] = out
        return out

    with torch.enable_grad(), intercepted(model, attend):
        hidden = run_model(model, batch).hidden
        distance = (hidden.double() - wanted.hidden.double()).square().sum() / 2
        gradients = torch.autograd.grad(distance, list(outputs.values()))
    effects = zip(outputs, gradients, strict=True)
    return {layer: (gradient.double() * errors[layer].double()).sum(dim=(0, 2, 3)) for layer, gradient in effects}


def largest_effects(effects: Mapping[int, Float[Tensor, " h"]], most: int) -> dict[tuple[int, int], float]:
    """The heads with the largest effects, as (layer, head), the largest first; none that would make it worse."""
    each = {(layer, head): value for layer, some in effects.items() for head, value in enumerate(some.tolist())}
    best = sorted((place for place, value in each.items() if value > 0), key=lambda place: -each[place])
    return {place: each[place] for place in best[:most]}
