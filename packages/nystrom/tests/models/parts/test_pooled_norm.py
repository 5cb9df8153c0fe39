"""The norm of what a classification head reads: its equation, its fixed values, and what it leaves alone."""

import pytest
import torch
from torch.testing import assert_close

from nystrom.models import (
    EncoderConfig,
    EncoderForMultipleChoice,
    EncoderForPairClassification,
    EncoderForPreTraining,
    EncoderForSequenceClassification,
    EncoderModel,
)
from nystrom.models.parts.modern import PooledNorm

# Sums of some hundred numbers of size 1 in float64.
CLOSE = {"rtol": 1e-10, "atol": 1e-12}


def make(kind=EncoderForSequenceClassification, **changes):
    torch.manual_seed(0)
    sizes = {"vocab_size": 17, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_labels": 3}
    sizes |= {"intermediate_size": 12, "max_position_embeddings": 40, "attention_options": {"num_landmarks": 5}}
    return kind(EncoderConfig(**(sizes | {"pooled_norm": "batch", "initializer_range": 0.3} | changes))).double()


def draw_tokens(*shape, seed=1):
    return torch.randint(0, 17, shape, generator=torch.Generator().manual_seed(seed))


def test_in_training_it_is_its_equation_over_the_batch():
    x = torch.randn(7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3 + 5
    m = x.mean(dim=0)
    v = (x - m).square().mean(dim=0)
    assert_close(PooledNorm(4).double()(x), (x - m) / (v + 1e-5).sqrt(), **CLOSE)
    assert not list(PooledNorm(4).parameters())


@pytest.mark.parametrize("training", [True, False])
def test_a_sequence_by_itself_gets_the_fixed_values(training):
    norm = PooledNorm(4).double().train(training)
    norm.running_mean.fill_(2.0)
    norm.running_var.fill_(9.0)
    x = torch.arange(4, dtype=torch.float64)[None]
    assert_close(norm(x), (x - 2) / (9 + 1e-5) ** 0.5, **CLOSE)
    assert_close(norm.running_mean, torch.full((4,), 2.0, dtype=torch.float64), rtol=0, atol=0)


def test_texts_of_a_new_encoder_hardly_differ_without_it():
    model, seen = make(initializer_range=0.05).train(), []
    model.classifier.norm.register_forward_hook(lambda _, given, y: seen.extend((given[0], y)))
    model(draw_tokens(200, 40))
    (before, after), spread = seen, lambda x: x.std(dim=0, correction=0).square().mean().sqrt()
    assert spread(before) < 0.3 * before.square().mean().sqrt()
    assert_close(spread(after), torch.ones((), dtype=torch.float64), rtol=1e-2, atol=0)


def test_both_documents_of_a_pair_have_one_norm():
    model, ids, seen = make(EncoderForPairClassification).train(), draw_tokens(5, 2, 12), []
    model.classifier.norm.register_forward_hook(lambda _, given, y: seen.append((given[0], y)))
    model.classifier.dense.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    model(ids)
    (x, y), parts = seen
    assert x.shape == (10, 16)
    first, second = y[::2], y[1::2]
    assert_close(parts, torch.cat([first, second, first * second, first - second], dim=-1), **CLOSE)


@pytest.mark.parametrize("kind", [EncoderForPreTraining, EncoderForMultipleChoice])
def test_other_heads_that_pool_refuse_it(kind):
    with pytest.raises(ValueError, match=f"pooled_norm is 'batch', which {kind.__name__} does not support"):
        make(kind)


def test_an_unknown_norm_is_refused():
    with pytest.raises(ValueError, match="pooled_norm is 'layer'; expected one of 'none', 'batch'"):
        make(pooled_norm="layer")


def test_an_encoder_alone_is_given_the_start_and_a_head_without_a_norm_is_refused(tmp_path):
    make(EncoderModel).float().save_pretrained(tmp_path / "encoder")
    norm = EncoderForSequenceClassification.from_pretrained(tmp_path / "encoder").classifier.norm
    assert_close(norm.running_mean, torch.zeros(16), rtol=0, atol=0)
    assert_close(norm.running_var, torch.ones(16), rtol=0, atol=0)
    make(pooled_norm="none").float().save_pretrained(tmp_path / "head")
    with pytest.raises(ValueError, match=r"does not fit its config.json, for example in classifier\.norm"):
        EncoderForSequenceClassification.from_pretrained(tmp_path / "head", pooled_norm="batch")
