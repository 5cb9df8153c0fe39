"""A configuration raises for what contradicts itself or would do nothing, and keeps what a file holds beside."""

import json
import warnings

import pytest
from transformers import AutoConfig, NystromformerConfig

from nystrom.models import EncoderConfig, EncoderModel


def test_fields_that_transformers_has_keep_their_names():
    shared = EncoderConfig().to_dict().keys() & NystromformerConfig().to_dict().keys()
    assert shared >= {
        *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act"),
        *("hidden_dropout_prob", "attention_probs_dropout_prob", "max_position_embeddings", "type_vocab_size"),
        *("initializer_range", "layer_norm_eps", "pad_token_id", "conv_kernel_size"),
    }


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"attention": "nystorm"}, "attention 'nystorm' is unknown.*Perhaps you meant 'nystrom'"),
        ({"attention_options": {"landmark": 3}}, "option of nystrom 'landmark' is unknown.*'landmarks'"),
        ({"attention_options": {"num_landmarks": 0}}, "num_landmarks is 0"),
        ({"attention": "softmax", "attention_options": {"num_landmarks": 8}}, "option of softmax 'num_landmarks'"),
        ({"attention_options": [8]}, r"attention_options is \[8\]"),
        ({"num_landmarks": 8}, r"pass attention_options=\{'num_landmarks': 8\}"),
        ({"num_hidden_layer": 2}, "EncoderConfig 'num_hidden_layer' is unknown.*'num_hidden_layers'"),
        ({"hidden_size": 30}, "hidden_size is 30 but num_attention_heads is 12"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"conv_kernel_size": 4}, "conv_kernel_size is 4"),
        ({"conv_kernel_size": 0}, "conv_kernel_size is 0"),
        ({"norm": "mid"}, "norm is 'mid'"),
        ({"pooling": "last"}, "pooling is 'last'"),
        ({"hidden_act": "gulu"}, "hidden_act 'gulu' is unknown"),
        ({"hidden_dropout_prob": 1}, "hidden_dropout_prob is 1"),
        ({"layer_norm_eps": 0.0}, "layer_norm_eps is 0.0"),
        ({"layer_norm_eps": float("inf")}, "layer_norm_eps is inf"),
        ({"initializer_range": -0.1}, "initializer_range is -0.1"),
        ({"sparse_prediction": 1}, "sparse_prediction is 1"),
        ({"attention_probs_dropout_prob": 0.1}, "attention_probs_dropout_prob is 0.1.*hidden_dropout_prob"),
        ({"pad_token_id": 30000}, "pad_token_id is 30000 but vocab_size is 30000"),
        ({"chunk_size_feed_forward": 8}, "chunk_size_feed_forward is 8"),
    ],
)
def test_a_wrong_value_is_refused_by_name(wrong, says):
    with pytest.raises(ValueError, match=says):
        EncoderConfig(**wrong)


def test_a_value_that_was_set_later_is_refused_by_the_model():
    config = EncoderConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, intermediate_size=8)
    config.attention = "nystorm"
    with pytest.raises(ValueError, match="'nystorm' is unknown"):
        EncoderModel(config)


def test_a_configuration_comes_back_from_its_file(tmp_path):
    config = EncoderConfig(
        attention="skyformer", attention_options={"num_landmarks": 8, "gamma": 0.2}, conv_kernel_size=5, norm="pre",
        pooling="first", task="listops", num_labels=10,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "nystrom"
    assert EncoderConfig.from_pretrained(tmp_path).to_diff_dict() == config.to_diff_dict()


def test_a_large_epsilon_is_a_number_like_others():
    assert EncoderConfig(layer_norm_eps=1.0, initializer_range=1.0).layer_norm_eps == 1.0


@pytest.mark.parametrize("published", [False, True])
def test_what_was_set_on_a_configuration_survives_saving_and_loading(published, tmp_path):
    config = EncoderConfig(pooling="first", conv_kernel_size=5, attention="softmax")
    config.segment_means_seq_len = 16 if published else None
    config.data_version, config.notes = "2026-11", {"corpus": ["a", "b"]}
    config.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == (
        "nystromformer" if published else "nystrom"
    )
    again = EncoderConfig.from_pretrained(tmp_path)
    assert (again.data_version, again.notes) == ("2026-11", {"corpus": ["a", "b"]})
    assert again.to_diff_dict() == config.to_diff_dict()
    assert EncoderConfig.from_json_file(tmp_path / "config.json").notes == config.notes
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert (type(theirs) is EncoderConfig, theirs.notes) == (not published, config.notes)
    # Once more, by way of the file that was written from what was read.
    again.save_pretrained(tmp_path / "again")
    assert EncoderConfig.from_pretrained(tmp_path / "again").to_diff_dict() == config.to_diff_dict()
    with pytest.raises(ValueError, match="EncoderConfig 'data_version' is unknown"):
        EncoderConfig(data_version="2026-11")


def test_an_option_of_the_attention_among_the_fields_of_a_file_is_reported(tmp_path):
    config = EncoderConfig()
    config.num_landmarks = 8
    config.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="'num_landmarks', which nothing reads.*belong in attention_options"):
        assert EncoderConfig.from_pretrained(tmp_path).num_landmarks == 8
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        EncoderConfig.from_pretrained(tmp_path, attention="linear")


@pytest.mark.parametrize("name", ["transformers_weights", "check", "attribute_map"])
def test_a_file_cannot_name_other_weights_or_replace_a_method(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nystrom", name: {}}))
    with pytest.raises(ValueError, match=f"holds '{name}', which cannot be an attribute"):
        EncoderConfig.from_pretrained(tmp_path)


def test_options_are_not_shared_between_configurations():
    EncoderConfig().attention_options["num_landmarks"] = 8
    assert EncoderConfig().attention_options == {}
