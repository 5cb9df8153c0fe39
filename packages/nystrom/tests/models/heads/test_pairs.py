"""Pairs of documents: the four-part head, padding, and folders that the other parts of the library take."""

import pytest
import torch
import torch.nn.functional as F

from nystrom.command_options import ConvertOptions
from nystrom.integrations.convert import convert
from nystrom.models import EncoderConfig, EncoderForPairClassification
from nystrom.models.heads.sequences import pool


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = EncoderConfig(
        vocab_size=11,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=12,
        max_position_embeddings=20,
        attention="softmax",
        num_labels=3,
    )
    return EncoderForPairClassification(config).eval()


def pairs(batch=4, n=9):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(11, (batch, 2, n), generator=generator)
    lengths = torch.randint(1, n + 1, (batch, 2, 1), generator=generator)
    return ids, torch.arange(n) < lengths


def test_it_is_the_four_part_head_on_both_pooled_documents(model):
    ids, mask = pairs()
    pooled = []
    for i in range(2):
        x = model.nystromformer(ids[:, i], attention_mask=mask[:, i]).last_hidden_state
        pooled.append(pool(x, mask[:, i]))
    a, b = pooled
    hidden = F.relu(model.classifier.dense(torch.cat([a, b, a * b, a - b], dim=-1)))
    expected = model.classifier.out_proj(hidden)
    labels = torch.tensor([0, 1, 2, 0])
    output = model(ids, attention_mask=mask, labels=labels)
    # float32 rounding: four documents at a time or eight
    torch.testing.assert_close(output.logits, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(output.loss, F.cross_entropy(output.logits, labels))


def test_padding_and_neighbours_change_nothing(model):
    ids, mask = pairs()
    longer = F.pad(ids, (3, 5), value=7), F.pad(mask, (3, 5))
    together = model(ids, attention_mask=mask).logits
    for i in range(4):
        alone = model(longer[0][i : i + 1], attention_mask=longer[1][i : i + 1]).logits
        # float32 rounding
        torch.testing.assert_close(alone[0], together[i], rtol=1e-5, atol=1e-5)


def test_it_is_saved_and_loaded(model, tmp_path):
    model.save_pretrained(tmp_path)
    ids, mask = pairs()
    again = EncoderForPairClassification.from_pretrained(tmp_path)
    assert torch.equal(again(ids, attention_mask=mask).logits, model(ids, attention_mask=mask).logits)


def test_its_folder_can_be_converted(model, tmp_path):
    model.save_pretrained(tmp_path / "model")
    done = convert(
        ConvertOptions(tmp_path / "model", tmp_path / "longer", max_position_embeddings=30, stretch="repeat")
    )
    assert done.model == "EncoderForPairClassification"
    longer = EncoderForPairClassification.from_pretrained(tmp_path / "longer")
    ids, mask = pairs()
    # float32 rounding
    torch.testing.assert_close(longer(ids, attention_mask=mask).logits, model(ids, attention_mask=mask).logits)
    assert longer(torch.ones(1, 2, 30, dtype=torch.long), return_dict=False)[0].shape == (1, 3)


@pytest.mark.refuses
def test_what_is_no_pair_is_refused(model):
    ids, mask = pairs()
    with pytest.raises(ValueError, match=r"input_ids has shape \(4, 9\); expected \(batch, 2 documents, tokens\)"):
        model(ids[:, 0])
    with pytest.raises(ValueError, match=r"input_ids has shape \(4, 1, 9\)"):
        model(ids[:, :1])
    with pytest.raises(ValueError, match=r"attention_mask has shape .* but input_ids has"):
        model(ids, attention_mask=mask[..., 1:])
    with pytest.raises(ValueError, match=r"token_type_ids has shape .* but input_ids has"):
        model(ids, token_type_ids=ids[:1])
