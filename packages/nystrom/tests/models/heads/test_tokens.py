"""Tokens, answers and choices: losses are those of transformers, and inputs that do not fit raise."""

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import nystrom.models
from nystrom.models import EncoderConfig, EncoderForMultipleChoice, EncoderForQuestionAnswering

SIZES = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
# float32 rounding through two layers and six iterations of the inverse.
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def make(kind):
    torch.manual_seed(0)
    return kind(EncoderConfig(**SIZES, initializer_range=0.3)).eval()


def draw(*shape, high=40):
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("head", "labels"),
    [
        ("ForMaskedLM", {"labels": torch.where(draw(3, 16) % 2 == 0, -100, draw(3, 16))}),
        ("ForTokenClassification", {"labels": draw(3, 16, high=3)}),
        ("ForSequenceClassification", {"labels": draw(3, high=3)}),
        ("ForMultipleChoice", {"labels": draw(3, high=2)}),
        (
            "ForQuestionAnswering",
            {"start_positions": torch.tensor([0, 5, 16]), "end_positions": torch.tensor([3, 40, 1])},
        ),
    ],
)
def test_the_loss_is_that_of_transformers(published, head, labels):
    # A landmark for each token, so that samples and choices there do not share a start value.
    theirs, folder = published(head, num_landmarks=16)
    ours = getattr(nystrom.models, f"Encoder{head}").from_pretrained(folder)
    ids = draw(3, 2, 16) if head == "ForMultipleChoice" else draw(3, 16)
    assert_close(ours(ids, **labels).loss, theirs(ids, **labels).loss, **CLOSE)


def test_answers_that_were_all_cut_off_have_no_loss():
    model, behind = make(EncoderForQuestionAnswering), torch.full((3,), 16)
    assert model(draw(3, 16), start_positions=behind, end_positions=behind).loss == 0


def test_an_answer_at_a_masked_token_is_left_out_of_the_loss():
    model, ids, mask = make(EncoderForQuestionAnswering), draw(3, 16), torch.ones(3, 16, dtype=torch.long)
    mask[0, 10:], mask[1, :4] = 0, 0
    # The first answer starts and ends in padding, the second starts there, the third does not.
    start, end = torch.tensor([12, 0, 5]), torch.tensor([13, 9, 8])
    loss = model(ids, attention_mask=mask, start_positions=start, end_positions=end).loss
    scores = model(ids, attention_mask=mask)
    expected = F.cross_entropy(scores.start_logits[2:], start[2:]) + F.cross_entropy(scores.end_logits[1:], end[1:])
    assert_close(loss, expected / 2, **CLOSE)
    loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.grad is not None)


def test_choices_are_scored_as_sequences_of_their_own():
    model, ids = make(EncoderForMultipleChoice), draw(2, 3, 12)
    mask = torch.ones_like(ids)
    mask[1, 2, 7:] = 0
    together = model(ids, attention_mask=mask).logits
    for i in range(2):
        for j in range(3):
            alone = model(ids[i : i + 1, j : j + 1], attention_mask=mask[i : i + 1, j : j + 1]).logits
            assert_close(together[i, j], alone[0, 0], **CLOSE)
    words = model.get_input_embeddings()(ids)
    assert_close(model(inputs_embeds=words, attention_mask=mask).logits, together, rtol=0, atol=0)


@pytest.mark.refuses
@pytest.mark.parametrize(
    ("kind", "wrong", "says"),
    [
        (
            EncoderForMultipleChoice,
            {"input_ids": draw(2, 12)},
            r"input_ids has shape \(2, 12\); expected \(batch, choices",
        ),
        (
            EncoderForMultipleChoice,
            {"input_ids": draw(2, 3, 12), "attention_mask": torch.ones(2, 12).long()},
            r"attention_mask has shape \(2, 12\)",
        ),
        (EncoderForMultipleChoice, {}, "neither input_ids nor inputs_embeds"),
        (
            EncoderForQuestionAnswering,
            {"input_ids": draw(2, 12), "start_positions": torch.zeros(2).long()},
            "end_positions is None; expected both",
        ),
        (
            EncoderForQuestionAnswering,
            {
                "input_ids": draw(2, 12),
                "start_positions": torch.zeros(3).long(),
                "end_positions": torch.zeros(2).long(),
            },
            r"start_positions has shape \(3,\); expected \(2,\)",
        ),
    ],
)
def test_inputs_that_do_not_fit_are_refused_by_name(kind, wrong, says):
    with pytest.raises(ValueError, match=says):
        make(kind)(**wrong)
