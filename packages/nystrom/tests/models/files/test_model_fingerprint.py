"""A fingerprint names the part in which two models differ."""

import hashlib
import json

import pytest

from nystrom.models.files.model_fingerprint import changed_parts, model_fingerprint

FILES = {
    "model.safetensors": "weights",
    "config.json": "configuration",
    "tokenizer.json": "tokenizer",
    "vocab.txt": "tokenizer",
    "tokenizer_config.json": "tokenizer",
    "modules.json": "pooling",
    "sentence_bert_config.json": "pooling",
    "1_Pooling/config.json": "pooling",
    "2_Dense/model.safetensors": "pooling",
}
MODULES = json.dumps([{"path": ""}, {"path": "1_Pooling"}, {"path": "2_Dense"}, {"path": "3_Normalize"}])


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    for name in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(MODULES if name == "modules.json" else name)
    return folder


@pytest.mark.parametrize(("name", "part"), FILES.items())
def test_a_change_of_any_file_is_a_change_of_its_part_alone(model, name, part):
    before = model_fingerprint(model)
    (model / name).write_text(f" {(model / name).read_text()}")
    assert changed_parts(model_fingerprint(model), before) == [part]
    (model / name).unlink()
    assert changed_parts(model_fingerprint(model), before) == [part]


def test_what_is_beside_a_model_and_its_place_do_not_count(model, tmp_path):
    before = model_fingerprint(model)
    for name in ("README.md", "complete.json", "trainer_state.json", "notes.txt", "pytorch_model.bin"):
        (model / name).write_text("mine")
    assert model_fingerprint(model.rename(tmp_path / "moved")) == before


def test_of_an_earlier_version_the_weights_alone_are_compared(model):
    digest = hashlib.sha256(b"model.safetensors").hexdigest()
    before = hashlib.sha256(json.dumps({"model.safetensors": digest}).encode()).hexdigest()[:16]
    (model / "config.json").write_text("other")
    assert changed_parts(model_fingerprint(model), before) == []
    (model / "model.safetensors").write_text("other")
    assert changed_parts(model_fingerprint(model), before) == ["weights"]


def test_a_part_that_was_not_there_may_come(model):
    whole = model_fingerprint(model)
    for name in FILES:
        if FILES[name] in ("tokenizer", "pooling"):
            (model / name).unlink()
    bare = model_fingerprint(model)
    assert changed_parts(whole, bare) == []
    assert changed_parts(bare, whole) == ["tokenizer", "pooling"]


def test_modules_outside_of_the_folder_are_not_read(model):
    (model / "modules.json").write_text(json.dumps([{"path": ""}, {"path": "../other"}]))
    with pytest.raises(ValueError, match=r"names the module '\.\./other'"):
        model_fingerprint(model)
