"""Comparison of an ONNX file with the model that it was exported from, on inputs other than those of the export."""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from nystrom.attention.heads import AttentionHeads
from nystrom.attention.method_names import NO_ATTENTION
from nystrom.attention.plan import PLAN, plan_of_options
from nystrom.attention.registry import METHODS
from nystrom.checks import check_names
from nystrom.evaluation import evaluating
from nystrom.models.encoder import EncoderPreTrainedModel
from nystrom.models.heads.pairs import EncoderForPairClassification
from nystrom.models.heads.tokens import EncoderForMultipleChoice
from nystrom.native import onnx_library

# Rounding of float32 through the inverse and the layers, relative to the largest output; where ONNX means something
# else than torch the difference is far larger.
_TOLERANCE = 1e-3
# And in runs of more than _LONG tokens, beyond those that are exact: of two clusters or heavy keys that are equal to
# rounding, the file may take the other. A MiniLM at 2,048 tokens differed by 5e-3 on one text and by 4e-6 on another.
_WITH_TIES = 2e-2
# The runs to compare: sequences, tokens, padding on the left and on the right; -1 is the longest input, at most _LONG
# tokens more than are exact.
_RUNS = ((1, 1, 0, 0), (1, 9, 0, 0), (3, 33, 4, 9), (2, -1, 0, 5), (4, 130, 20, 70))
_LONG = 600


def compare(
    file: Path, model: PreTrainedModel, inputs: Sequence[str], *, loops: bool
) -> tuple[tuple[tuple[int, ...], ...], float]:
    """Run the file and the model on the same inputs; return the shapes and the largest relative difference.

    Raises:
        ArithmeticError: They differ by more than rounding, or those of the model are not finite.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    if loops:
        options.register_custom_ops_library(str(onnx_library()))
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    limit, shapes, worst = longest(model), [], 0.0
    for batch, length, left, right in _RUNS:
        length = _LONG + _exact_up_to(model) if length < 0 else length
        length = length if limit is None else min(limit, length)
        fed = example(model, batch, length, min(left, length - 1), right)[: len(inputs)]
        shapes.append(tuple(fed[0].shape))
        came = session.run(None, {name: x.cpu().numpy() for name, x in zip(inputs, fed, strict=True)})
        with torch.no_grad(), evaluating(model):
            wanted = OutputEntries(model)(*fed)
        for ours, theirs in zip(wanted, came, strict=True):
            ours, theirs = (_of_real_tokens(x, fed[1].cpu(), model) for x in (ours.cpu(), torch.from_numpy(theirs)))
            if not torch.isfinite(ours).all():
                raise ArithmeticError(
                    f"outputs of the model itself are not finite at {shapes[-1]}, so the file cannot be compared with "
                    "it, and was not kept: its weights are too large."
                )
            off = (theirs - ours).abs().max() / ours.abs().max().clamp(min=1e-12)
            # NaN counts as larger than any tolerance.
            off = float(off.nan_to_num(torch.inf))
            worst = max(worst, off)
            if off > (_TOLERANCE if length <= _LONG else _WITH_TIES):
                raise ArithmeticError(
                    f"the ONNX file differs from the model by {off:.1e} of the largest output at {shapes[-1]}, and "
                    f"was not kept. check=False (--no-check) keeps it; attention 'softmax' or 'nystrom' in place of "
                    f"{method_of(model)!r} may work."
                )
    return tuple(shapes), worst


def _exact_up_to(model: PreTrainedModel) -> int:
    """The most tokens of which some layer's attention is exact by its option `exact_up_to`."""
    return max((getattr(options, "exact_up_to", 0) for _, options in methods_of(model)), default=0)


def _of_real_tokens(x: Tensor, mask: Tensor, model: PreTrainedModel) -> Tensor:
    """Outputs of real tokens, and of sequences that begin with one.

    A layer of transformers gives padding other outputs in short inputs, and a pooler reads the first token.
    """
    if isinstance(model, EncoderPreTrainedModel):
        return x
    return x[mask.bool()] if x.shape[: mask.ndim] == mask.shape else x[mask[:, 0].bool()]


class OutputEntries(nn.Module):
    """The tensors of a model's output, as a tuple."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Run the model without a loss."""
        output = self.model(
            input_ids,
            attention_mask=attention_mask,
            # Some models have no segments.
            **({} if token_type_ids is None else {"token_type_ids": token_type_ids}),
            output_hidden_states=False,
            return_dict=True,
        )
        return tuple(x for x in output.values() if isinstance(x, Tensor))


def method_of(model: PreTrainedModel) -> str:
    """The method of a model's attention, or what transformers calls it."""
    if isinstance(model, EncoderPreTrainedModel):
        return model.config.attention
    return str(model.config._attn_implementation)


def methods_of(model: PreTrainedModel) -> list[tuple[str, Any]]:
    """The methods of a model's layers, with their options; for a model of transformers as its configuration says.

    Raises:
        ValueError: An option of the configuration that its method does not have.
    """
    if heads := [module for module in model.modules() if isinstance(module, AttentionHeads)]:
        return [(module.method, module.options) for module in heads]
    method, options = method_of(model), dict(getattr(model.config, "attention_options", None) or {})
    layers = plan_of_options(options).layers if method == PLAN else [(method, options)]
    # Which layers are exact is no option of a method.
    chosen = [
        (name, {x: value for x, value in given.items() if x != "exact_layers"})
        for name, given in layers
        if name in METHODS
    ]
    for name, given in chosen:
        known = {entry.name for entry in fields(METHODS[name].options)}
        check_names(f"option of {name} in config.attention_options", given, known)
    return [(name, METHODS[name].options(**given)) for name, given in chosen]


def longest(model: PreTrainedModel) -> int | None:
    """The longest input, by the positions or by Linformer's length; None without a limit, as with rotary positions."""
    if not isinstance(model, EncoderPreTrainedModel):
        tables = [x for name, x in model.named_modules() if name.endswith("position_embeddings")]
        # RoBERTa's has rows that no token has, up to that of the padding token.
        rows = [
            x.num_embeddings - 1 - (-1 if x.padding_idx is None else x.padding_idx)
            for x in tables
            if isinstance(x, nn.Embedding)
        ]
        return min(rows, default=None)
    limits = [model.config.longest_input]
    for layer in range(model.config.num_hidden_layers):
        method, options = model.config.layer_attention(layer)
        if method == NO_ATTENTION:
            continue
        limits.append(getattr(METHODS[method].options(**options), "max_length", None))
    return min((limit for limit in limits if limit is not None), default=None)


def example(model: PreTrainedModel, batch: int, length: int, left: int, right: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, their mask with padding on both sides of the last sequence, and their segments."""
    groups = {EncoderForMultipleChoice: (3,), EncoderForPairClassification: (2,)}.get(type(model), ())
    generator = torch.Generator().manual_seed(batch * length)
    shape = (batch, *groups, length)
    ids, segments = (
        torch.randint(0, size, shape, generator=generator, device=generator.device)
        for size in (model.config.vocab_size, getattr(model.config, "type_vocab_size", 1))
    )
    mask = torch.ones_like(ids)
    mask[-1, ..., :left] = 0
    mask[-1, ..., max(length - right, left + 1) :] = 0
    return ids.to(model.device), mask.to(model.device), segments.to(model.device)
