"""A broken or malicious folder ends in one clear error, and no pickle is ever opened."""

import errno
import json
import logging
import os
import pickle
import re
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from huggingface_hub.errors import RepositoryNotFoundError
from safetensors.torch import load_file, save_file
from transformers import (
    AlbertConfig,
    AutoModel,
    AutoModelForMaskedLM,
    DistilBertConfig,
    NystromformerForMaskedLM,
    SqueezeBertConfig,
)

from nystrom.models import (
    EncoderConfig,
    EncoderForMaskedLM,
    EncoderForMultipleChoice,
    EncoderForPreTraining,
    EncoderForSequenceClassification,
    EncoderForTokenClassification,
    EncoderModel,
)
from nystrom.models.files.loading import SizeMismatchError, check_weights

SIZES = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}


@pytest.fixture
def folder(tmp_path):
    """A masked LM in this library's format."""
    EncoderForMaskedLM(EncoderConfig(**SIZES, num_labels=3)).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


class Bomb:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return (os.mkdir, (str(self.mark),))


def plant(file, mark):
    file.write_bytes(pickle.dumps({"weight": Bomb(mark)}))


def change_weights(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def change_config(folder, **changes):
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | changes))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.ckpt"])
@pytest.mark.parametrize("kind", [EncoderForMaskedLM, AutoModelForMaskedLM])
def test_a_pickle_is_never_opened(folder, tmp_path, name, kind):
    (folder / "model.safetensors").unlink()
    plant(folder / name, tmp_path / "mark")
    with pytest.raises(ValueError, match=rf"{name} can\..*convert it .*save_pretrained"):
        kind.from_pretrained(folder)
    with pytest.raises(ValueError, match="use_safetensors is False; expected True"):
        kind.from_pretrained(folder, use_safetensors=False)
    assert not (tmp_path / "mark").exists()


def test_the_mark_would_have_been_left(tmp_path):
    plant(tmp_path / "weights.bin", tmp_path / "mark")
    pickle.loads((tmp_path / "weights.bin").read_bytes())
    assert (tmp_path / "mark").exists()


def test_an_index_cannot_lead_to_a_pickle_or_out_of_the_folder(folder, tmp_path):
    EncoderForMaskedLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="20KB")
    (folder / "model.safetensors").unlink(missing_ok=True)
    index = folder / "model.safetensors.index.json"
    whole = json.loads(index.read_text())
    plant(folder / "pytorch_model.bin", tmp_path / "mark")
    for name in ("pytorch_model.bin", "../model.safetensors", "/tmp/model.safetensors"):
        index.write_text(json.dumps({"weight_map": whole["weight_map"] | {"cls.predictions.bias": name}}))
        with pytest.raises(ValueError, match="expected safetensors files beside it"):
            EncoderForMaskedLM.from_pretrained(folder)
    index.write_text(json.dumps({"weight_map": ["x"]}))
    with pytest.raises(ValueError, match="no weight_map"):
        EncoderForMaskedLM.from_pretrained(folder)
    index.write_text(json.dumps({"weight_map": whole["weight_map"] | {"x": "model-00009.safetensors"}}))
    with pytest.raises(ValueError, match=r"lacks model-00009.safetensors, which model.safetensors.index.json names"):
        EncoderForMaskedLM.from_pretrained(folder)
    assert not (tmp_path / "mark").exists()


def test_a_file_of_weights_is_no_folder(folder, tmp_path):
    plant(folder / "pytorch_model.bin", tmp_path / "mark")
    with pytest.raises(ValueError, match=r"pytorch_model.bin; expected the folder that holds it"):
        EncoderForMaskedLM.from_pretrained(folder / "pytorch_model.bin", config=EncoderConfig(**SIZES))
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("kept", [0, 4, 1000, -1])
def test_a_file_that_is_cut_off_is_refused(folder, kept):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"model.safetensors is not a safetensors file, or is truncated"):
        EncoderForMaskedLM.from_pretrained(folder)


def test_weights_that_may_not_be_read_are_not_told_as_damaged(folder, monkeypatch):
    opened = Path.open

    def refuse(path, *given, **named):
        if path.suffix == ".safetensors":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opened(path, *given, **named)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(PermissionError, match=r"Permission denied: '\S+model.safetensors'"):
        EncoderForMaskedLM.from_pretrained(folder)


@pytest.mark.parametrize(
    ("lost", "kind"),
    [
        ("nystromformer.encoder.layer.1.attention.self.key.weight", EncoderForMaskedLM),
        ("nystromformer.encoder.layer.1.attention.self.key.weight", EncoderModel),
        ("nystromformer.embeddings.word_embeddings.weight", EncoderModel),
        ("cls.predictions.transform.dense.bias", EncoderForMaskedLM),
        ("cls.predictions.bias", EncoderForPreTraining),
    ],
)
def test_a_missing_weight_is_refused_by_name(folder, lost, kind):
    change_weights(folder, lambda weights: weights.pop(lost))
    with pytest.raises(ValueError, match=f"does not fit its config.json, for example in .*{lost.split('.')[-2]}"):
        kind.from_pretrained(folder)


@pytest.mark.parametrize("kind", [EncoderForMaskedLM, EncoderModel])
@pytest.mark.parametrize("extra", ["nystromformer.encoder.layer.2.output.dense.bias", "backdoor.weight"])
def test_a_weight_without_a_place_is_refused_by_name(folder, extra, kind):
    change_weights(folder, lambda weights: weights.update({extra: torch.zeros(32)}))
    with pytest.raises(ValueError, match=r"which Encoder.* does not have"):
        kind.from_pretrained(folder)


def test_a_head_with_a_weight_too_many_is_refused(folder):
    change_weights(folder, lambda weights: weights.update({"cls.predictions.gate": torch.zeros(32)}))
    with pytest.raises(ValueError, match=r"cls.predictions.gate, which EncoderForMaskedLM does not have"):
        EncoderForMaskedLM.from_pretrained(folder)


def test_a_new_head_starts_anew(folder, tmp_path):
    torch.manual_seed(0)
    model, report = EncoderForSequenceClassification.from_pretrained(folder, output_loading_info=True)
    assert {name.split(".")[0] for name in report["missing_keys"]} == {"classifier"}
    assert {name.split(".")[0] for name in report["unexpected_keys"]} == {"cls"}
    stored = load_file(folder / "model.safetensors")
    for name, weight in model.nystromformer.state_dict().items():
        assert torch.equal(weight, stored[f"nystromformer.{name}"])
    assert model.classifier.dense.weight.std().item() == pytest.approx(0.02, rel=0.2)
    model.save_pretrained(tmp_path / "sequences")
    # A head of the same name that is another one.
    other = EncoderForTokenClassification.from_pretrained(tmp_path / "sequences")
    assert other.classifier.weight.shape == (3, 32)


def test_a_masked_lm_on_a_bare_encoder_starts_with_words_of_the_encoder(folder, tmp_path):
    EncoderModel.from_pretrained(folder).save_pretrained(tmp_path / "bare")
    model = EncoderForMaskedLM.from_pretrained(tmp_path / "bare")
    predictions = model.cls.predictions
    assert predictions.decoder.weight is model.get_input_embeddings().weight
    assert predictions.decoder.bias is predictions.bias
    assert not predictions.bias.any()


def test_weights_of_another_size_are_refused(folder, tmp_path):
    change_config(folder, intermediate_size=56)
    with pytest.raises(ValueError, match=r"weights of other sizes than its config.json says"):
        EncoderForMaskedLM.from_pretrained(folder)
    change_config(folder, intermediate_size=48)
    EncoderForTokenClassification.from_pretrained(folder).save_pretrained(tmp_path / "tokens")
    # transformers raises the first of these, this library the second for wrong arguments.
    for kind in (RuntimeError, ValueError):
        with pytest.raises(kind, match="ignore_mismatched_sizes=True for a new head"):
            EncoderForTokenClassification.from_pretrained(tmp_path / "tokens", num_labels=7)
    with pytest.raises(SizeMismatchError):
        EncoderForTokenClassification.from_pretrained(tmp_path / "tokens", num_labels=7)
    model = EncoderForTokenClassification.from_pretrained(
        tmp_path / "tokens", num_labels=7, ignore_mismatched_sizes=True
    )
    assert (model.config.num_labels, model.classifier.weight.shape) == (7, (7, 32))
    assert EncoderForMultipleChoice.from_pretrained(
        tmp_path / "tokens", ignore_mismatched_sizes=True
    ).classifier.weight.shape == (1, 32)


@pytest.mark.parametrize(
    "sizes",
    [
        {"num_hidden_layers": 10**6},
        {"hidden_size": 10**9},
        {"intermediate_size": 10**9},
        {"vocab_size": 10**10},
        {"num_hidden_layers": 10**4, "hidden_size": 10**4},
    ],
)
def test_a_config_of_a_far_larger_model_is_refused_before_a_model_is_made(folder, sizes, monkeypatch):
    change_config(folder, **sizes)
    made = Mock(side_effect=AssertionError)
    monkeypatch.setattr(EncoderForMaskedLM, "__init__", made)
    with pytest.raises(
        ValueError, match=r"does not fit its config.json, whose .* weights where its files hold"
    ) as error:
        EncoderForMaskedLM.from_pretrained(folder)
    assert "\n" not in str(error.value)
    made.assert_not_called()


@pytest.mark.parametrize(
    "config",
    [
        AlbertConfig(vocab_size=300, embedding_size=4, hidden_size=64, num_hidden_layers=12, intermediate_size=64),
        DistilBertConfig(vocab_size=30, dim=16, n_layers=2, n_heads=2, hidden_dim=32),
        SqueezeBertConfig(vocab_size=4, embedding_size=48, hidden_size=48, num_hidden_layers=4, intermediate_size=192),
    ],
    ids=lambda config: config.model_type,
)
def test_models_that_share_or_leave_out_weights_fit_their_config(config, tmp_path):
    AutoModel.from_config(config).save_pretrained(tmp_path)
    check_weights(tmp_path)


def test_what_transformers_says_of_weights_is_said_where_they_fit(folder, hooks):
    said, log = [], logging.getLogger("transformers.modeling_utils")
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    log.addHandler(handler)
    hooks.callback(log.removeHandler, handler)
    EncoderForSequenceClassification.from_pretrained(folder)
    assert ["LOAD REPORT" in message for message in said] == [True]
    change_weights(folder, lambda weights: weights.update({"backdoor.weight": torch.zeros(32)}))
    with pytest.raises(ValueError, match="backdoor"):
        EncoderForSequenceClassification.from_pretrained(folder)
    assert len(said) == 1


def test_two_values_for_one_weight_are_refused(folder):
    change_weights(folder, lambda weights: weights.update({"cls.predictions.decoder.weight": torch.ones(40, 32)}))
    with pytest.raises(ValueError, match=r"different values for cls.predictions.decoder.weight and .*word_embeddings"):
        EncoderForMaskedLM.from_pretrained(folder)
    change_weights(folder, lambda weights: weights.update({"cls.predictions.decoder.bias": torch.ones(40)}))
    model = EncoderForMaskedLM.from_pretrained(folder, tie_word_embeddings=False)
    assert (model.cls.predictions.decoder.weight == 1).all()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "config.json is not valid JSON"),
        ("\x00\x01", "config.json is not valid JSON"),
        ("[]", "config.json holds a list; expected a JSON object"),
        ('{"hidden_size": 8}', "names no model_type; expected 'nystrom' or 'nystromformer'"),
        ('{"model_type": "bert"}', "is of type 'bert'; expected 'nystrom', or .*Convert a BERT or RoBERTa"),
        ('{"model_type": "nystrom", "attention": "nystorm"}', "attention 'nystorm' is unknown.*'nystrom'"),
        ('{"model_type": "nystrom", "attention_options": {"landmark": 1}}', "option of nystrom 'landmark' is unknown"),
        ('{"model_type": "nystrom", "hidden_size": "8"}', "hidden_size is '8'"),
        ('{"model_type": "nystrom", "transformers_weights": "x.bin"}', "'transformers_weights', which cannot be"),
        ('{"model_type": "nystrom", "_attn_implementation": "a/b"}', "attn_implementation is 'a/b'"),
        ('{"model_type": "nystrom", "hidden_size": 10}', "hidden_size is 10 but num_attention_heads is 12"),
        ('{"model_type": "nystrom", "num_labels": 3, "id2label": {"0": "a"}}', "num_labels is 3 but id2label names 1"),
    ],
)
def test_a_configuration_that_is_none_is_refused(folder, text, says, capsys):
    (folder / "config.json").write_text(text)
    # The name of an attention is looked at by models alone.
    kinds = (EncoderForMaskedLM, EncoderModel, *(() if "_attn" in text else (EncoderConfig,)))
    for kind in kinds:
        with pytest.raises(ValueError, match=says):
            kind.from_pretrained(folder)


def test_an_option_among_the_fields_is_sent_to_its_place(folder):
    with pytest.raises(ValueError, match=r"pass attention_options=\{'num_landmarks': 8\}"):
        EncoderForMaskedLM.from_pretrained(folder, num_landmarks=8)
    model = EncoderForMaskedLM.from_pretrained(folder, attention_options={"num_landmarks": 8})
    assert model.nystromformer.encoder.layer[0].attention.self.method.options.num_landmarks == 8


def test_options_that_are_not_named_stay_as_they_were(folder):
    change_config(folder, attention_options={"num_landmarks": 8, "pinv": "ridge"})
    config = EncoderConfig.from_pretrained(folder, attention_options={"num_landmarks": 16})
    assert config.attention_options == {"num_landmarks": 16, "pinv": "ridge"}
    other = EncoderConfig.from_pretrained(folder, attention="linear")
    assert (other.attention, other.attention_options) == ("linear", {})


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nowhere", "model is 'nowhere'; expected a folder, or OWNER/NAME"),
        ("/nowhere/model", "expected a folder"),
        ("./nowhere", "expected a folder"),
        ("a/b/c", "expected a folder"),
    ],
)
def test_what_can_be_no_name_is_not_looked_for_elsewhere(name, says):
    with pytest.raises(ValueError, match=says):
        EncoderForMaskedLM.from_pretrained(name)


def put_in_cache(cache, name, folder, *revisions):
    """Lay a folder out as huggingface_hub stores what it has downloaded, so that it is found without a network."""
    repository, commit = cache / f"models--{name.replace('/', '--')}", revisions[0].replace("/", "") * 8
    shutil.copytree(folder, repository / "snapshots" / commit)
    for revision in revisions:
        (repository / "refs" / revision).parent.mkdir(parents=True, exist_ok=True)
        (repository / "refs" / revision).write_text(commit)


def test_a_model_of_the_hub_passes_the_same_checks(folder, tmp_path):
    put_in_cache(tmp_path, "someone/model", folder, "v1")
    options = {"cache_dir": tmp_path, "local_files_only": True}
    model = EncoderForMaskedLM.from_pretrained("someone/model", revision="v1", **options)
    assert model.config.name_or_path == "someone/model"
    (folder / "model.safetensors").unlink()
    plant(folder / "pytorch_model.bin", tmp_path / "mark")
    put_in_cache(tmp_path, "someone/model", folder, "main")
    with pytest.raises(ValueError, match=r'pytorch_model.bin can\..*such as revision="refs/pr/1"'):
        EncoderForMaskedLM.from_pretrained("someone/model", **options)
    assert not (tmp_path / "mark").exists()


def test_published_weights_are_found_in_the_revision_that_holds_them(published, tmp_path):
    theirs, folder = published()
    options, name = {"cache_dir": tmp_path, "local_files_only": True}, "uw-madison/nystromformer-1024"
    put_in_cache(tmp_path, name, folder, "refs/pr/1")
    (folder / "model.safetensors").unlink()
    put_in_cache(tmp_path, name, folder, "main")
    with pytest.warns(UserWarning, match=r"nystromformer-1024 has no safetensors in its main revision: refs/pr/1"):
        model = EncoderForMaskedLM.from_pretrained(name, **options)
    ids = torch.arange(16)[None]
    # float32 rounding through two layers and six iterations of the inverse
    torch.testing.assert_close(model(ids).logits, theirs(ids).logits, rtol=1e-4, atol=1e-4)
    # Whoever names a revision gets that one, and another model raises.
    with pytest.raises(
        ValueError, match=r"holds no model.safetensors: only that format is read, since it cannot run code\.$"
    ):
        EncoderForMaskedLM.from_pretrained(name, revision="main", **options)
    put_in_cache(tmp_path, "someone/else", folder, "main")
    with pytest.raises(ValueError, match=r'holds no model.safetensors.*such as revision="refs/pr/1"'):
        EncoderForMaskedLM.from_pretrained("someone/else", **options)


def test_a_model_that_is_nowhere_is_named_in_one_line_with_the_way_out(tmp_path, monkeypatch):
    with pytest.raises(OSError, match=r"^model someone/else is not a local folder, .* --local-dir FOLDER\)\.$"):
        EncoderForMaskedLM.from_pretrained("someone/else", cache_dir=tmp_path, local_files_only=True)

    def none(name, **_):
        raise RepositoryNotFoundError("404\nmany lines", response=Mock(headers={}))

    monkeypatch.setattr("nystrom.models.files.loading.snapshot_download", none)
    with pytest.raises(
        OSError, match=r"^model someone/else is not a local folder, and the Hugging Face Hub has no .*$"
    ):
        EncoderForMaskedLM.from_pretrained("someone/else")
    with pytest.raises(ValueError, match=r"^model is \S+nowhere, which is not a folder"):
        check_weights(tmp_path / "nowhere")


def test_an_adapter_is_sent_to_peft(folder):
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "someone/else"}')
    with pytest.raises(ValueError, match=r"holds an adapter .*PeftModel.from_pretrained"):
        EncoderForMaskedLM.from_pretrained(folder)


def test_a_subfolder_and_a_variant_are_found(folder, tmp_path):
    EncoderForMaskedLM.from_pretrained(folder).save_pretrained(tmp_path / "outer" / "inner", variant="half")
    model = EncoderForMaskedLM.from_pretrained(tmp_path / "outer", subfolder="inner", variant="half")
    assert model.config.vocab_size == 40
    with pytest.raises(ValueError, match=r"holds no model.safetensors"):
        EncoderForMaskedLM.from_pretrained(tmp_path / "outer", subfolder="inner")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda folder: (folder / "config.json").write_text("{"), "is not valid JSON"),
        (lambda folder: change_config(folder, model_type="bert"), "is of type 'bert'"),
        (lambda folder: change_config(folder, attention="nystorm"), "attention 'nystorm' is unknown"),
        (
            lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
            "since it cannot run code",
        ),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 100), "not a safetensors file"),
        (lambda folder: change_weights(folder, lambda w: w.pop("cls.predictions.bias")), "does not fit"),
        (lambda folder: shutil.rmtree(folder), "expected a folder"),
    ],
)
def test_a_damaged_folder_of_a_model_is_named(folder, change, says):
    change(folder)
    with pytest.raises(ValueError, match=re.escape(says)):
        EncoderForMaskedLM.from_pretrained(folder)


def test_what_transformers_converted_loads(folder, tmp_path, published):
    # The way out that the error names: transformers alone, in a place where it can do no harm.
    theirs, source = published()
    torch.save(theirs.state_dict(), source / "pytorch_model.bin")
    (source / "model.safetensors").unlink()
    NystromformerForMaskedLM.from_pretrained(source).save_pretrained(tmp_path / "converted")
    _, report = EncoderForMaskedLM.from_pretrained(tmp_path / "converted", output_loading_info=True)
    assert not any(report.values())
