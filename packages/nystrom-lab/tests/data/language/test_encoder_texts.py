"""Models from folders, and texts as their inputs."""

import json

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, BertLMHeadModel, BertModel, T5Config, T5Model

from nystrom.models import EncoderConfig, EncoderForMaskedLM
from nystrom_lab.data.language.encoder_texts import Prose, load_encoder, read_batches, tokens_of
from nystrom_lab.data.language.tokenizer import load_tokenizer

SMALL = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


def test_models_are_loaded_with_their_heads(tmp_path, tiny_bert):
    BertForSequenceClassification(BertConfig(**SMALL)).save_pretrained(tmp_path / "bert")
    EncoderForMaskedLM(EncoderConfig(**SMALL)).save_pretrained(tmp_path / "own")
    kinds = [type(load_encoder(folder)) for folder in (tmp_path / "bert", tmp_path / "own", tiny_bert)]
    assert kinds == [BertForSequenceClassification, EncoderForMaskedLM, BertModel]
    assert not load_encoder(tmp_path / "bert").training


def edit_config(folder, **changes):
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))


@pytest.mark.parametrize("kind", [BertModel, BertForSequenceClassification])
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"intermediate_size": 24}, r"for example .*layer\.0\.intermediate\.dense\.bias of shape \(16,\) where"),
        # Layers that the folder does not hold would be measured at random weights.
        ({"num_hidden_layers": 2}, r"does not fit its config.json, for example in .*layer\.1"),
        ({"num_hidden_layers": 0}, r"does not fit its config.json, for example in .*layer\.0"),
    ],
)
def test_a_model_that_does_not_fit_its_config_is_refused(tmp_path, kind, changes, says):
    kind(BertConfig(**SMALL)).save_pretrained(tmp_path)
    edit_config(tmp_path, **changes)
    with pytest.raises(ValueError, match=says) as error:
        load_encoder(tmp_path)
    assert "\n" not in str(error.value)


def test_a_head_that_the_folder_does_not_hold_is_not_measured(tmp_path):
    BertModel(BertConfig(**SMALL)).save_pretrained(tmp_path)
    edit_config(tmp_path, architectures=["BertForSequenceClassification"])
    with pytest.raises(ValueError, match=r"does not fit its config.json, for example in classifier\.bias"):
        load_encoder(tmp_path)


def test_texts_have_one_length_and_the_special_tokens(tiny_bert, prose):
    tokenizer, text, model = load_tokenizer(tiny_bert), Prose("prose.txt", prose.read_text()), load_encoder(tiny_bert)
    batches = read_batches(text, tokenizer, model, length=None, num_texts=3)
    assert [batch["input_ids"].shape for batch in batches] == [(1, 32)] * 3
    first = batches[0]["input_ids"][0]
    assert (first[0], first[-1]) == (tokenizer.cls_token_id, tokenizer.sep_token_id)
    assert torch.equal(first[1:-1], tokens_of(text, tokenizer)[:30])
    assert read_batches(text, tokenizer, model, length=10, num_texts=1)[0]["input_ids"].shape == (1, 10)


def test_what_cannot_be_inspected_raises_in_one_line(tmp_path, tiny_bert, prose):
    BertLMHeadModel(BertConfig(is_decoder=True, **SMALL)).save_pretrained(tmp_path / "decoder")
    T5Model(T5Config(vocab_size=40, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)).save_pretrained(
        tmp_path / "t5"
    )
    BertModel(BertConfig(**SMALL)).save_pretrained(tmp_path / "strange")
    edit_config(tmp_path / "strange", model_type="strange")
    cases = {"decoder": "decoder", "t5": "decoder", "strange": "does not know", "none": "not a folder"}
    for name, says in cases.items():
        with pytest.raises(ValueError, match=says) as caught:
            load_encoder(tmp_path / name)
        assert str(caught.value).count("\n") == 0
    tokenizer, text, model = load_tokenizer(tiny_bert), Prose("prose.txt", prose.read_text()), load_encoder(tiny_bert)
    cases = ((33, 1, "32 positions"), (32, 1000, "have 4000 tokens"), (4, 1, "length"), (8, 0, "num_texts"))
    for length, num_texts, says in cases:
        with pytest.raises(ValueError, match=says):
            read_batches(text, tokenizer, model, length=length, num_texts=num_texts)
