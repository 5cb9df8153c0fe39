"""A folder's config.json is data: it chooses no code to run, and ends in one line where it asks for some."""

import json
import shutil

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, BertModel, Dinov2Config, Dinov2Model

from nystrom.integrations.model_loader import load_model, read_model_config
from nystrom.models import EncoderConfig, EncoderForMaskedLM

SMALL = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """The folder of a BERT with a head."""
    folder = tmp_path_factory.mktemp("models") / "classifier"
    BertForSequenceClassification(BertConfig(**SMALL)).save_pretrained(folder)
    return folder


@pytest.fixture
def edited(classifier, tmp_path):
    """Copy this folder with other fields in its config.json."""

    def make(**changes):
        folder = shutil.copytree(classifier, tmp_path / "model")
        content = json.loads((folder / "config.json").read_text()) | changes
        content = {name: value for name, value in content.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(content))
        return folder

    return make


NO_MODEL = r"names the model '\w+', which is no model of type 'bert' in transformers"
ASKS = r"= .*which a package or downloaded code would compute: remove it, or name one of torch"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        # Names of transformers that are no models, or none of this type
        ({"architectures": ["Trainer"]}, NO_MODEL),
        ({"architectures": ["logging"]}, NO_MODEL),
        ({"architectures": ["pipeline"]}, NO_MODEL),
        ({"architectures": ["AutoTokenizer"]}, NO_MODEL),
        ({"architectures": ["PreTrainedModel"]}, NO_MODEL),
        ({"architectures": ["GPT2Model"]}, NO_MODEL),
        ({"architectures": "BertModel"}, r"has architectures = 'BertModel'; expected the name of a class, in a list"),
        ({"architectures": [3]}, r"has architectures = \[3\]"),
        ({"architectures": {"a": 1}}, r"has architectures = \{'a': 1\}"),
        # Attention that somebody else would compute, in the whole or in a part
        ({"attn_implementation": "someone/kernel"}, r"attn_implementation = 'someone/kernel'"),
        ({"_attn_implementation": "someone/kernel"}, f"_attn_implementation {ASKS}"),
        ({"attn_implementation": "flash_attention_2"}, f"attn_implementation {ASKS}"),
        ({"attn_implementation": "paged|sdpa"}, f"attn_implementation {ASKS}"),
        ({"attn_implementation": {"": "sdpa", "text_config": "someone/kernel"}}, f"attn_implementation {ASKS}"),
        ({"attn_implementation": ["sdpa"]}, f"attn_implementation {ASKS}"),
        ({"text_config": {"attn_implementation": "someone/kernel"}}, f"attn_implementation {ASKS}"),
        ({"parts": [{"attn_implementation": "someone/kernel"}]}, f"attn_implementation {ASKS}"),
        ({"experts_implementation": "someone/kernel"}, r"experts_implementation = 'someone/kernel'"),
        # Other files than those that were checked
        (
            {"transformers_weights": "other.safetensors"},
            r"transformers_weights = 'other.safetensors', which is not followed",
        ),
        ({"text_config": {"auto_map": {"AutoModel": "own.Own"}}}, r"auto_map = .*, which is not followed"),
        # Values that transformers does not check
        ({"model_type": 3}, "is of type 3, which transformers does not know"),
        ({"model_type": ["bert"]}, r"is of type \['bert'\], which transformers does not know"),
        ({"model_type": None}, "is of type None, which transformers does not know"),
        ({"hidden_size": "8"}, "is not a valid configuration of bert"),
        ({"hidden_act": "nothing"}, r"cannot be made from its config.json \(KeyError: 'nothing'\)"),
        ({"num_attention_heads": 0}, r"cannot be made from its config.json \(ZeroDivisionError"),
        ({"vocab_size": -3}, r"cannot be made from its config.json \(RuntimeError"),
    ],
)
def test_a_config_that_asks_for_something_else_ends_in_one_line(changes, says, edited):
    folder = edited(**changes)
    with pytest.raises(ValueError, match=says) as refused:
        load_model(folder)
    assert "\n" not in str(refused.value)
    assert str(folder) in str(refused.value)


@pytest.mark.parametrize("name", [None, "sdpa", "eager", "near_far"])
def test_an_attention_of_torch_or_of_this_library_is_followed(name, edited):
    model, _ = load_model(edited(attn_implementation=name))
    assert model.config._attn_implementation == (name or "sdpa")
    assert type(model) is BertForSequenceClassification
    assert not model.training


def test_files_of_code_beside_a_model_are_not_run(edited, tmp_path):
    own = {"AutoConfig": "own.Own", "AutoModel": "own.Own", "AutoModelForSequenceClassification": "own.Own"}
    folder = edited(auto_map=own)
    (folder / "own.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')\nclass Own: pass\n")
    assert type(load_model(folder)[0]) is BertForSequenceClassification
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | {"architectures": ["Own"]}))
    # A class that transformers does not have; its encoder is one that it has.
    assert type(load_model(folder)[0]) is BertModel
    (folder / "config.json").write_text(json.dumps(content | {"model_type": "own"}))
    with pytest.raises(ValueError, match="is of type 'own', which transformers does not know"):
        load_model(folder)
    assert not (tmp_path / "mark").exists()


def test_models_of_this_library_and_of_other_kinds_are_loaded_too(tmp_path):
    EncoderForMaskedLM(EncoderConfig(**SMALL)).save_pretrained(tmp_path / "own")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    Dinov2Model(Dinov2Config(**sizes)).save_pretrained(tmp_path / "pictures")
    assert type(load_model(tmp_path / "own")[0]) is EncoderForMaskedLM
    assert type(read_model_config(tmp_path / "own")) is EncoderConfig
    model, report = load_model(tmp_path / "pictures")
    assert type(model) is Dinov2Model
    assert not report["missing_keys"]


def test_a_new_head_is_only_made_where_it_may_be(classifier, tmp_path):
    BertModel(BertConfig(**SMALL)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"does not fit its config.json, for example in classifier\.bias"):
        load_model(tmp_path, BertForSequenceClassification)
    model, report = load_model(tmp_path, BertForSequenceClassification, new_heads=True)
    assert "classifier.weight" in report["missing_keys"]
    assert torch.isfinite(model.classifier.weight).all()
