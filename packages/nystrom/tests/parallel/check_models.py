"""Models over ranks: scores, losses and gradients beside those of one process; run by `ranks.py`."""

import functools

import pytest
import torch
import torch.distributed as dist

from nystrom.models import (
    EncoderConfig,
    EncoderForMaskedLM,
    EncoderForPreTraining,
    EncoderForQuestionAnswering,
    EncoderForSequenceClassification,
    EncoderForTokenClassification,
)
from nystrom.parallel import parallelize

PIECES = (7, 16)
LABELS = {
    EncoderForMaskedLM: {"labels": "tokens"},
    EncoderForPreTraining: {"labels": "tokens", "sentence_order_label": "sequences"},
    EncoderForSequenceClassification: {"labels": "sequences"},
    EncoderForTokenClassification: {"labels": "tokens"},
}
VARIANTS = {
    EncoderForSequenceClassification: [{"pooling": "mean"}, {"pooling": "first"}, {"pooling": "max"}],
    EncoderForMaskedLM: [{}, {"positions": "rotary"}],
}
# float64 rounding through two layers, each with an inverse, over sums in another order.
CLOSE = {"rtol": 1e-7, "atol": 1e-9}


def checks():
    for kind in LABELS:
        for changes in VARIANTS.get(kind, [{}]):
            for masked in (False, True):
                check = functools.partial(the_model_gives_what_one_process_gives, kind, changes, masked)
                yield f"{kind.__name__} {changes} {'masked' if masked else 'open'}", check
    yield "refusals", what_does_not_work_over_ranks_is_refused


def build(kind, **changes):
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 30,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "max_position_embeddings": 23,
        "conv_kernel_size": 5,
        "attention_options": {"num_landmarks": 4},
        # So large that attention is far from uniform.
        "initializer_range": 0.3,
    }
    return kind(EncoderConfig(**sizes | changes)).double().eval()


def the_model_gives_what_one_process_gives(kind, changes, masked):
    model, source = build(kind, num_labels=2, **changes), torch.Generator().manual_seed(1)
    ids = torch.randint(30, (2, 23), generator=source)
    kinds = {
        "tokens": torch.where(
            torch.rand(2, 23, generator=source) < 0.6, torch.randint(2, (2, 23), generator=source), -100
        ),
        "sequences": torch.tensor([1, 0]),
    }
    given = {"input_ids": ids} | {name: kinds[label] for name, label in LABELS[kind].items()}
    if masked:
        # The first real token of one sequence is on the second rank.
        given["attention_mask"] = (torch.arange(23) >= torch.tensor([[9], [0]])) & (torch.arange(23) != 20)
    expected = model(**given)
    expected.loss.backward()
    theirs = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    parallelize(model, dist.group.WORLD)
    cut = {name: x.split(PIECES, 1)[dist.get_rank()] if x.ndim == 2 else x for name, x in given.items()}
    out = model(**cut)
    torch.testing.assert_close(out.loss, expected.loss, **CLOSE)
    for name in ("logits", "prediction_logits", "sop_logits"):
        if name in out:
            mine = expected[name].split(PIECES, 1)[dist.get_rank()] if expected[name].ndim == 3 else expected[name]
            torch.testing.assert_close(out[name], mine, **CLOSE)
    out.loss.backward()
    weights = dict(model.named_parameters())
    for name, grad in theirs.items():
        total = weights[name].grad if weights[name].grad is not None else torch.zeros_like(grad)
        dist.all_reduce(total)
        torch.testing.assert_close(
            total / dist.get_world_size(), grad, **CLOSE, msg=lambda text, name=name: name + text
        )
    parallelize(model, None)
    torch.testing.assert_close(model(**given).loss, expected.loss, rtol=0, atol=0)


def what_does_not_work_over_ranks_is_refused():
    with pytest.raises(ValueError, match="model is a EncoderForQuestionAnswering, which does not work over ranks"):
        parallelize(build(EncoderForQuestionAnswering), dist.group.WORLD)
    model = build(EncoderForMaskedLM, attention="reformer", attention_options={"num_buckets": 2, "chunk_size": 4})
    with pytest.raises(ValueError, match="model attends by reformer, which does not work over ranks: use one of softm"):
        parallelize(model, dist.group.WORLD)
    model = build(EncoderForMaskedLM, short_conv_kernel_size=3)
    with pytest.raises(ValueError, match=r"model has .*query_conv, a ShortConvolution, which does not work over ranks"):
        parallelize(model, dist.group.WORLD)
    model = build(EncoderForMaskedLM, attention="none", attention_options={})
    with pytest.raises(ValueError, match="model has no attention"):
        parallelize(model, dist.group.WORLD)
    with pytest.raises(ValueError, match="group is a str"):
        parallelize(build(EncoderForMaskedLM), "tokens")
    model = build(EncoderForMaskedLM)
    parallelize(model, dist.group.WORLD)
    with pytest.raises(ValueError, match="the ranks hold 24 tokens, padding included, and the model has 23 positions"):
        model(torch.ones(1, 12, dtype=torch.int64))
