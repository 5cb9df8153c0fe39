"""A saved model of the task is scored on every sample; other models raise."""

import pytest
import torch

from nystrom.models import EncoderForSequenceClassification
from nystrom_lab.config import EvaluateOptions
from nystrom_lab.data.lra.listops.task import ListOps, prepare_listops
from nystrom_lab.training.scoring import accuracy, evaluate, load_model
from nystrom_lab.training.tasks import find_task


def test_the_score_counts_every_sample_for_any_batch(whole, data):
    task, split = find_task("listops"), ListOps(data, "test")
    model = load_model(whole / "best", "listops", classes=split.classes)
    with torch.no_grad():
        right = [
            int(model(torch.as_tensor(split[i]["input_ids"]).long()[None]).logits.argmax()) == split[i]["labels"]
            for i in range(len(split))
        ]
    for batch_size in (1, 7, 64):
        assert accuracy(model, split, task, batch_size=batch_size, device="cpu", precision="float32") == sum(right) / 30


def test_only_models_of_the_task_are_scored(whole, data, tmp_path):
    with pytest.raises(ValueError, match=r"which holds no config.json"):
        evaluate(EvaluateOptions("listops", model=tmp_path, data=data))
    model = EncoderForSequenceClassification.from_pretrained(whole / "best")
    for change, says in (
        ({"task": "text"}, "was trained on text, with 17 tokens and 10 classes; expected listops"),
        ({"model_type": "bert"}, "is of type 'bert'; expected 'nystrom'"),
    ):
        model.save_pretrained(tmp_path / "other")
        config = (tmp_path / "other" / "config.json").read_text()
        for name, value in change.items():
            config = config.replace(f'"{name}": "{getattr(model.config, name)}"', f'"{name}": "{value}"')
        (tmp_path / "other" / "config.json").write_text(config)
        with pytest.raises(ValueError, match=says):
            evaluate(EvaluateOptions("listops", model=tmp_path / "other", data=data))


def labelled(model, folder, names):
    """The same weights, with other names for the classes."""
    model.config.id2label, model.config.label2id = dict(enumerate(names)), {name: i for i, name in enumerate(names)}
    model.save_pretrained(folder)
    return folder


def test_a_model_of_other_labels_is_not_scored(whole, tmp_path):
    model = EncoderForSequenceClassification.from_pretrained(whole / "best")
    digits = [str(i) for i in range(10)]
    letters = labelled(model, tmp_path / "letters", list("abcdefghij"))

    assert load_model(letters, "listops", classes=list("abcdefghij")).config.id2label[9] == "j"
    # One other name, the same names in another order, and numbers from 1 on, which are labels like all others.
    for classes in (list("abcdefghiz"), list("bacdefghij"), [str(i) for i in range(1, 11)]):
        shown = ", ".join(map(repr, classes))
        with pytest.raises(ValueError, match=f"on the classes 'a', 'b'.*'j', but those of the data are {shown}"):
            load_model(letters, "listops", classes=classes)
    assert load_model(whole / "best", "listops", classes=digits).config.id2label[9] == "9"


def test_classes_that_have_only_numbers_are_taken_in_their_order_with_a_warning(whole, tmp_path, capsys):
    model = EncoderForSequenceClassification.from_pretrained(whole / "best")
    letters, digits = list("abcdefghij"), [str(i) for i in range(10)]
    unnamed = [f"LABEL_{i}" for i in range(10)]
    for names, classes, warned in (
        (letters, digits, True),
        (digits, letters, True),
        (unnamed, letters, True),
        (letters, letters, False),
        (digits, digits, False),
    ):
        folder = labelled(model, tmp_path / "model", names)
        load_model(folder, "listops", classes=classes)
        says = f"warning: the classes of model {folder} are '{names[0]}', '{names[1]}'"
        assert (says in capsys.readouterr().err) is warned


def test_only_safetensors_that_fit_are_read(whole, data, tmp_path):
    model = EncoderForSequenceClassification.from_pretrained(whole / "best")
    model.save_pretrained(tmp_path)
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('"num_hidden_layers": 2', '"num_hidden_layers": 3'))
    with pytest.raises(ValueError, match=r"does not fit its config.json, for example in nystromformer.encoder.layer.2"):
        evaluate(EvaluateOptions("listops", model=tmp_path, data=data, device="cpu"))
    (tmp_path / "config.json").write_text(config)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"holds no model.safetensors: only that format is read"):
        evaluate(EvaluateOptions("listops", model=tmp_path, data=data, device="cpu"))
    model.nystromformer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"does not fit its config.json, for example in classifier.dense.bias"):
        evaluate(EvaluateOptions("listops", model=tmp_path, data=data, device="cpu"))


def test_a_split_without_samples_is_named(whole, tmp_path):
    folder = prepare_listops(tmp_path / "data", train=8, val=0, test=4, min_length=5, max_length=30, workers=1)
    with pytest.raises(ValueError, match=r"data .* holds no samples in val; expected at least one"):
        evaluate(EvaluateOptions("listops", model=whole / "best", data=folder, split="val", device="cpu"))
