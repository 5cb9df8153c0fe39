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


@pytest.mark.parametrize("kind", [EncoderForMaskedLM, EncoderForPreTraining])
def test_in_training_the_masked_tokens_alone_may_be_scored_with_the_same_loss_and_gradients(kind):
    ids, words, order = draw()
    labels = {"labels": words} | ({"sentence_order_label": order} if kind is EncoderForPreTraining else {})
    results = []
    for sparse in (False, True):
        model = make(kind, sparse_prediction=sparse, hidden_dropout_prob=0.0).train()
        output = model(ids, **labels)
        output.loss.backward()
        results.append((output.loss, output[1], [parameter.grad for parameter in model.parameters()]))
    (loss, scores, gradients), (sparse_loss, sparse_scores, sparse_gradients) = results
    assert_close(sparse_loss, loss, **CLOSE)
    assert_close(sparse_gradients, gradients, **CLOSE)
    assert sparse_scores.shape == (4 * 6, 40)
    assert_close(sparse_scores, scores[words != -100], **CLOSE)


def test_evaluation_scores_all_tokens_and_so_does_training_without_labels():
    model, (ids, words, _) = make(EncoderForMaskedLM, sparse_prediction=True, hidden_dropout_prob=0.0), draw()
    assert model(ids, labels=words).logits.shape == (4, 12, 40)
    assert model.train()(ids).logits.shape == (4, 12, 40)
    labels = {"labels": words[:, 1:]}
    with pytest.raises(ValueError, match=r"labels has shape \(4, 11\); expected \(4, 12\)"):
        model(ids, **labels)


@pytest.mark.long
def test_a_compiled_training_step_scores_the_masked_tokens_alone():
    torch._dynamo.reset()
    model, (ids, words, _) = make(EncoderForMaskedLM, sparse_prediction=True, hidden_dropout_prob=0.0), draw()
    expected = model.train()(ids, labels=words)
    came = torch.compile(model, backend="eager", fullgraph=True)(ids, labels=words)
    assert came.logits.shape == (24, 40)
    assert_close(came.loss, expected.loss, **CLOSE)


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


@pytest.mark.parametrize("sparse", [False, True])
def test_a_batch_without_a_masked_word_has_a_loss_of_zero(sparse):
    model, (ids, words, _) = make(EncoderForMaskedLM, sparse_prediction=sparse).train(), draw()
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
        ({"labels": torch.zeros(4, 12)}, "labels has dtype torch.float32; expected integer classes"),
        ({"sentence_order_label": torch.zeros(4, 1, dtype=torch.long)}, r"sentence_order_label has shape \(4, 1\)"),
    ],
)
@pytest.mark.refuses
def test_labels_that_do_not_fit_are_refused_by_name(wrong, says):
    with pytest.raises(ValueError, match=says):
        make()(draw()[0], **wrong)


@pytest.mark.parametrize("tied", [True, False])
def test_more_words_are_saved_and_loaded(tied, tmp_path):
    torch.manual_seed(0)
    sizes = {"vocab_size": 17, "hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = EncoderConfig(**sizes, intermediate_size=16, max_position_embeddings=20, tie_word_embeddings=tied)
    model = EncoderForMaskedLM(config).eval()
    model.resize_token_embeddings(23)
    model.save_pretrained(tmp_path)
    again = EncoderForMaskedLM.from_pretrained(tmp_path)
    ids = torch.randint(23, (2, 9))
    torch.testing.assert_close(again(ids).logits, model(ids).logits, rtol=0, atol=0)
    assert (again.cls.predictions.bias is again.cls.predictions.decoder.bias) is tied
