"""Comparison of an ONNX file with the model that it was exported from, on inputs other than those of the export."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from nystrom.attention.method_names import NO_ATTENTION
from nystrom.attention.registry import METHODS
from nystrom.evaluation import evaluating
from nystrom.models.encoder import EncoderPreTrainedModel
from nystrom.models.heads.pairs import EncoderForPairClassification
from nystrom.models.heads.tokens import EncoderForMultipleChoice

# Rounding of float32 through the inverse and the layers, relative to the largest output; where ONNX means something
# else than torch the difference is far larger.
_TOLERANCE = 1e-3
# The runs to compare: sequences, tokens, padding on the left and on the right; -1 is the longest input, at most _LONG.
_RUNS = ((1, 1, 0, 0), (1, 9, 0, 0), (3, 33, 4, 9), (2, -1, 0, 5), (4, 130, 20, 70))
_LONG = 600


def compare(
    file: Path, model: EncoderPreTrainedModel, inputs: Sequence[str]
) -> tuple[tuple[tuple[int, ...], ...], float]:
    """Run the file and the model on the same inputs; return the shapes and the largest relative difference.

    Raises:
        ArithmeticError: They differ by more than rounding, or those of the model are not finite.
    """
    import onnxruntime

    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    limit, shapes, worst = longest(model), [], 0.0
    for batch, length, left, right in _RUNS:
        length = _LONG if length < 0 else length
        length = length if limit is None else min(limit, length)
        fed = example(model, batch, length, min(left, length - 1), right)[: len(inputs)]
        shapes.append(tuple(fed[0].shape))
        came = session.run(None, {name: x.cpu().numpy() for name, x in zip(inputs, fed, strict=True)})
        with torch.no_grad(), evaluating(model):
            wanted = OutputEntries(model)(*fed)
        for ours, theirs in zip(wanted, came, strict=True):
            ours = ours.cpu()
            if not torch.isfinite(ours).all():
                raise ArithmeticError(
                    f"outputs of the model itself are not finite at {shapes[-1]}, so the file cannot be compared with "
                    "it, and was not kept: its weights are too large."
                )
            off = (torch.from_numpy(theirs) - ours).abs().max() / ours.abs().max().clamp(min=1e-12)
            # NaN counts as larger than any tolerance.
            worst = max(worst, float(off.nan_to_num(torch.inf)))
            if worst > _TOLERANCE:
                raise ArithmeticError(
                    f"the ONNX file differs from the model by {worst:.1e} of the largest output at {shapes[-1]}, and "
                    f"was not kept. check=False (--no-check) keeps it; attention 'softmax' or 'nystrom' in place of "
                    f"{model.config.attention!r} may work."
                )
    return tuple(shapes), worst


class OutputEntries(nn.Module):
    """The tensors of a model's output, as a tuple."""

    def __init__(self, model: EncoderPreTrainedModel):
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Run the model without a loss."""
        output = self.model(
            input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            output_hidden_states=False,
            return_dict=True,
        )
        return tuple(output.values())


def longest(model: EncoderPreTrainedModel) -> int | None:
    """The longest input, by the positions or by Linformer's length; None without a limit, as with rotary positions."""
    limits = [model.config.longest_input]
    for layer in range(model.config.num_hidden_layers):
        method, options = model.config.layer_attention(layer)
        if method == NO_ATTENTION:
            continue
        limits.append(getattr(METHODS[method].options(**options), "max_length", None))
    return min((limit for limit in limits if limit is not None), default=None)


def example(
    model: EncoderPreTrainedModel, batch: int, length: int, left: int, right: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, their mask with padding on both sides of the last sequence, and their segments."""
    groups = {EncoderForMultipleChoice: (3,), EncoderForPairClassification: (2,)}.get(type(model), ())
    generator = torch.Generator().manual_seed(batch * length)
    shape = (batch, *groups, length)
    ids, segments = (
        torch.randint(0, size, shape, generator=generator, device=generator.device)
        for size in (model.config.vocab_size, model.config.type_vocab_size)
    )
    mask = torch.ones_like(ids)
    mask[-1, ..., :left] = 0
    mask[-1, ..., max(length - right, left + 1) :] = 0
    return ids.to(model.device), mask.to(model.device), segments.to(model.device)
