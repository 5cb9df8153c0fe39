import dataclasses
import json
import shutil

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoConfig, AutoModel, BertConfig, BertLMHeadModel, T5Config, T5EncoderModel

from nystrom.attention.functions import FUNCTIONS
from nystrom.models.files.model_fingerprint import model_fingerprint
from nystrom_papers.studies.reproduce.encoders import find_encoder, instead_of_bert_base
from nystrom_papers.studies.reproduce.study import Setting


def copy_files(folder, to, *beginnings):
    """Copy the files whose names begin so."""
    to.mkdir(exist_ok=True)
    for file in folder.iterdir():
        if file.name.startswith(beginnings):
            shutil.copy(file, to)


def test_recorded_queries_keys_and_values_give_the_attention_of_the_model(tiny_setting):
    encoder = find_encoder(tiny_setting)
    model = AutoModel.from_pretrained(tiny_setting.model).eval()
    recorded = encoder.record(24, 2, (0, 1))
    ids = encoder.tokens(24, 2)
    with torch.no_grad():
        embedded = model.embeddings(ids)
        layer = model.encoder.layer[0].attention.self
        wanted = layer(embedded)[0]
    q, k, v = recorded[0]
    assert q.shape == (2, 4, 24, 8)
    out = FUNCTIONS["softmax"](q, k, v).transpose(1, 2).flatten(2)
    # float32 rounding of the same products in another order.
    assert_close(out, wanted, rtol=1e-5, atol=1e-5)
    assert not torch.equal(recorded[0].q, recorded[1].q)


def test_the_setting_says_what_the_model_is(tiny_setting):
    assert find_encoder(tiny_setting).in_words()["fingerprint"] == model_fingerprint(tiny_setting.model)


def test_longer_texts_are_windows_of_the_models_positions(tiny_setting):
    encoder = find_encoder(tiny_setting)
    long, piece = encoder.record(80, 1, (2,))[2], encoder.tokens(80, 1)[:, 32:64]
    model = AutoModel.from_pretrained(tiny_setting.model).eval()
    with torch.no_grad():
        states = model(piece, output_hidden_states=True).hidden_states[2]
        wanted = model.encoder.layer[2].attention.self.key(states)
    assert_close(long.k[:, :, 32:64].transpose(1, 2).flatten(2), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["roberta", "distilbert", "electra", "modernbert"])
def test_other_families_are_recorded_too(kind, tiny_setting, tiny_bert, tmp_path):
    sizes = {
        "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
        "max_position_embeddings": 34, "pad_token_id": 1,
    }  # fmt: skip
    if kind == "distilbert":
        sizes |= {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24}
    if kind == "modernbert":
        sizes |= {"local_attention": 8, "bos_token_id": 2, "cls_token_id": 2, "eos_token_id": 3, "sep_token_id": 3}
    torch.manual_seed(0)
    AutoModel.from_config(AutoConfig.for_model(kind, **sizes)).save_pretrained(tmp_path)
    copy_files(tiny_bert, tmp_path, "tokenizer", "vocab")
    encoder = find_encoder(dataclasses.replace(tiny_setting, model=tmp_path))
    assert encoder.positions == (32 if kind == "roberta" else 34)
    assert encoder.record(70, 1, (1,))[1].k.shape == (1, 2, 70, 8)


def test_initialised_weights_are_others_and_repeatable(tiny_setting):
    encoder = find_encoder(tiny_setting)
    before = torch.random.get_rng_state()
    one, again, other = (encoder.record(16, 1, (0,), weights="initialised", seed=seed)[0].q for seed in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert not torch.equal(one, encoder.record(16, 1, (0,))[0].q)
    assert torch.equal(before, torch.random.get_rng_state())


def test_windows_are_spread_over_the_whole_text(tiny_setting):
    encoder = find_encoder(tiny_setting)
    ids = encoder.tokens(100, 3)
    assert ids.shape == (3, 100)
    everything = encoder.tokens(4000, 1)[0]
    assert torch.equal(ids[0], everything[:100])
    assert torch.equal(ids[2], everything[-100:])


BROKEN = {"no folder": "is not a folder", "causal": "decoder", "two parts": "decoder", "no weights": "safetensors"}
BROKEN |= {"no tokenizer": "tokenizer", "too short": "3 tokens"}


@pytest.mark.parametrize("what", BROKEN)
def test_what_cannot_be_recorded_ends_before_any_work(what, tiny_setting, tiny_bert, tmp_path):
    folder, texts = tmp_path / "model", tiny_setting.texts
    if what == "causal":
        config = BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, is_decoder=True)
        BertLMHeadModel(config).save_pretrained(folder)
    elif what == "two parts":
        config = T5Config(vocab_size=9, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
        T5EncoderModel(config).save_pretrained(folder)
        settings = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(settings | {"is_encoder_decoder": True}))
    elif what != "no folder":
        left_out = {"no weights": ("model",), "no tokenizer": ("tokenizer", "vocab")}.get(what, ())
        copy_files(tiny_bert, folder, *{"config", "model", "tokenizer", "vocab"}.difference(left_out))
    if what == "too short":
        texts = (tmp_path / "short.txt",)
        texts[0].write_text("one two three\n")
    with pytest.raises(ValueError, match=BROKEN[what]) as error:
        find_encoder(dataclasses.replace(tiny_setting, model=folder, texts=texts))
    assert "\n" not in str(error.value)


def test_a_causal_model_without_its_head_is_not_recorded(tiny_setting, tiny_bert, tmp_path):
    sizes = {"vocab_size": 40, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32}
    special = {"bos_token_id": 1, "eos_token_id": 1}
    AutoModel.from_config(AutoConfig.for_model("gpt2", **sizes, **special)).save_pretrained(tmp_path)
    copy_files(tiny_bert, tmp_path, "tokenizer", "vocab")
    encoder = find_encoder(dataclasses.replace(tiny_setting, model=tmp_path))
    with pytest.raises(ValueError, match="asks for a causal mask"):
        encoder.record(16, 1, (0,))


def test_the_reference_of_python_is_prose_enough(tiny_bert):
    encoder = find_encoder(Setting(model=tiny_bert))
    assert "reference of Python" in encoder.prose.name
    assert encoder.tokens(4096, 10).shape == (10, 4096)


def test_a_model_with_other_sizes_than_bert_base_is_named(tmp_path):
    for name, changes, says in (
        ("any-name", {}, ""),
        ("shallow", {"num_hidden_layers": 6}, "shallow instead of BERT-base"),
        ("narrow", {"hidden_size": 384}, "narrow instead of BERT-base"),
    ):
        BertConfig(**changes).save_pretrained(tmp_path / name)
        assert instead_of_bert_base(tmp_path / name) == says
