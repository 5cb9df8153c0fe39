"""The commands on models, whose signatures are declared without torch."""

import pytest
from transformers import BertConfig, BertForSequenceClassification

from nystrom import near_far_sizes
from nystrom.models import EncoderConfig, EncoderForSequenceClassification, EncoderModel
from nystrom_lab.cli.main import main


@pytest.mark.parametrize("words", [("export", "nowhere", "--to", "m.onnx"), ("convert", "nowhere", "--to", "made")])
def test_a_folder_that_is_not_there_is_named(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([*words]) == 2
    assert capsys.readouterr().err.startswith("nystrom: model is nowhere, which is not a folder")


def test_convert_takes_a_method_with_its_options(tiny_bert, tmp_path, capsys):
    words = ["convert", str(tiny_bert), "--to", str(tmp_path / "b"), "--attention", "near_far"]
    assert main([*words, "--num-features", "8"]) == 2
    assert "--num-features" in capsys.readouterr().err
    assert main([*words, "--block-size", "16"]) == 0
    config = EncoderModel.from_pretrained(tmp_path / "b").config
    assert (config.attention, config.attention_options) == (
        "near_far",
        near_far_sizes(40, selects=False) | {"block_size": 16},
    )


def test_convert_says_what_it_did(tmp_path, capsys):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 20}
    config = BertConfig(vocab_size=31, max_position_embeddings=24, **sizes)
    BertForSequenceClassification(config).save_pretrained(tmp_path / "a")
    words = ["convert", str(tmp_path / "a"), "--to", str(tmp_path / "b"), "--max-position-embeddings", "40"]
    assert main([*words, "--conv-kernel-size", "5", "--num-landmarks", "6"]) == 0
    said = capsys.readouterr().out
    assert "EncoderForSequenceClassification" in said
    assert "positions: 24 -> 40" in said
    config = EncoderModel.from_pretrained(tmp_path / "b").config
    assert (config.conv_kernel_size, config.attention_options) == (5, {"num_landmarks": 6})


def test_export_takes_the_class_that_saved_the_folder(tmp_path, capsys):
    pytest.importorskip("onnxruntime")
    sizes = {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = EncoderConfig(vocab_size=17, max_position_embeddings=40, attention="softmax", **sizes)
    EncoderForSequenceClassification(config).save_pretrained(tmp_path / "model")
    words = ["export", str(tmp_path / "model"), "--to", str(tmp_path / "model.onnx"), "--no-check"]
    assert main(words) == 0
    assert "input_ids, attention_mask -> logits" in capsys.readouterr().out
