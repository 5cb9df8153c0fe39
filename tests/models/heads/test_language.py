"""Masked words and the order of sentences: scores, losses and ties."""

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from nystrom.models import EncoderConfig, EncoderForMaskedLM, EncoderForPreTraining

SIZES = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def make(kind=EncoderForPreTraining, **changes):
    torch.manual_seed(0)
    config = EncoderConfig(**(SIZES | {"initializer_range": 0.3, "attention_options": {"num_landmarks": 5}} | changes))
    return kind(config).double().eval()


def draw(b=4, n=12):
    source = torch.Generator().manual_seed(1)
    ids, words = (torch.randint(0, 40, (b, n), generator=source) for _ in range(2))
    words[:, ::2] = -100
    return ids, words, torch.randint(0, 2, (b,), generator=source)


def test_the_loss_of_pretraining_is_that_of_words_plus_that_of_order():
    model, (ids, words, order) = make(), draw()
    output = model(ids, labels=words, sentence_order_label=order)
    expected = F.cross_entropy(output.prediction_logits.flatten(0, 1), words.flatten())
    expected = expected + F.cross_entropy(output.sop_logits, order)
    assert_close(output.loss, expected, **CLOSE)
    alone = model(ids, labels=words).loss + model(ids, sentence_order_label=order).loss
    assert_close(output.loss, alone, **CLOSE)
    assert model(ids).loss is None


def test_order_is_read_through_a_tanh():
    model, (ids, *_) = make(pooling="first"), draw()
    pooled = model.nystromformer(ids).last_hidden_state[:, 0]
    weights = model.sop.state_dict()
    hidden = torch.tanh(pooled @ weights["dense.weight"].T + weights["dense.bias"])
    expected = hidden @ weights["out_proj.weight"].T + weights["out_proj.bias"]
    assert_close(model(ids).sop_logits, expected, **CLOSE)


def test_pretraining_scores_words_as_masked_lm_does():
    model, (ids, words, _) = make(), draw()
    other = make(EncoderForMaskedLM)
    other.load_state_dict({name: weight for name, weight in model.state_dict().items() if not name.startswith("sop")})
    assert_close(other(ids, labels=words).to_tuple(), model(ids, labels=words).to_tuple()[:2], **CLOSE)


@pytest.mark.parametrize("kind", [EncoderForMaskedLM, EncoderForPreTraining])
def test_words_are_scored_by_their_embeddings(kind):
    tied, free = make(kind), make(kind, tie_word_embeddings=False)
    assert tied.cls.predictions.decoder.weight is tied.get_input_embeddings().weight
    assert tied.cls.predictions.decoder.bias is tied.cls.predictions.bias
    assert free.cls.predictions.decoder.weight is not free.get_input_embeddings().weight


def test_a_batch_without_a_masked_word_has_no_loss_rather_than_none_at_all():
    model, (ids, words, _) = make(EncoderForMaskedLM), draw()
    loss = model(ids, labels=torch.full_like(words, -100)).loss
    assert loss == 0
    loss.backward()
    assert all(parameter.grad.eq(0).all() for parameter in model.parameters())


def test_the_loss_is_taken_in_float32():
    model, (ids, words, _) = make(EncoderForMaskedLM), draw()
    assert model.bfloat16()(ids, labels=words).loss.dtype == torch.float32


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"labels": torch.zeros(4, 11, dtype=torch.long)}, r"labels has shape \(4, 11\); expected \(4, 12\)"),
        ({"labels": torch.zeros(4, 12)}, "labels has dtype torch.float32; expected classes"),
        ({"sentence_order_label": torch.zeros(4, 1, dtype=torch.long)}, r"sentence_order_label has shape \(4, 1\)"),
    ],
)
@pytest.mark.refuses
def test_labels_that_do_not_fit_are_refused_by_name(wrong, says):
    with pytest.raises(ValueError, match=says):
        make()(draw()[0], **wrong)
