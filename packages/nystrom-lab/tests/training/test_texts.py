"""A user's own labelled texts can be trained on directly: any number of classes, with their names."""

import json

import numpy as np
import pytest

from nystrom.models import EncoderForSequenceClassification
from nystrom_lab.config import EvaluateOptions
from nystrom_lab.data.lra.texts.reviews import Text, prepare_text
from nystrom_lab.measure.rows import read_rows
from nystrom_lab.training.scoring import evaluate

CLASSES = ("praise", "question", "rant")


@pytest.fixture
def own(tmp_path, monkeypatch):
    """120 texts of three classes, one of them longer than the demo's model."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    lines = ["text,label"]
    for i in range(120):
        words = rng.choice(["tea", "bus", "sea"], size=5).tolist()
        lines.append(f"{i} {CLASSES[i % 3]} {' '.join(words)}{' long' * 200 if i == 7 else ''},{CLASSES[i % 3]}")
    (tmp_path / "my.csv").write_text("\n".join(lines) + "\n")
    return tmp_path / "my.csv"


@pytest.mark.long
def test_labelled_texts_of_three_classes_are_trained_on(own, small_run, tmp_path):
    run = small_run(tmp_path / "run", task="text", data=own)
    model = EncoderForSequenceClassification.from_pretrained(run / "best")
    assert model.config.id2label == dict(enumerate(CLASSES))
    folder = json.loads((run / "run.json").read_text())["data"]["folder"]
    splits = {split: Text(folder, split) for split in ("train", "val", "test")}
    assert sum(map(len, splits.values())) == 120
    assert max(split.lengths.max() for split in splits.values()) == 512
    row = {row.quantity: row for row in read_rows(run / "rows.csv")}["test accuracy"]
    assert (row.study, row.repeats) == ("train text", len(splits["test"]))
    assert evaluate(EvaluateOptions("text", model=run / "best", data=own, device="cpu")).value == row.value


@pytest.mark.slow
def test_a_run_on_own_texts_resumes_with_or_without_their_name(own, small_run, tmp_path, interrupted, weights):
    whole = small_run(tmp_path / "whole", task="text", data=own)
    for name, data in (("named", own), ("known", None)):
        interrupted(8, small_run, tmp_path / name, task="text", data=own)
        run = small_run(tmp_path / name, task="text", data=data, resume=True)
        assert weights(run).keys() == weights(whole).keys()
        assert all((weight == weights(whole)[key]).all() for key, weight in weights(run).items())


@pytest.mark.long
def test_a_model_of_other_classes_is_not_scored(own, small_run, tmp_path):
    run = small_run(tmp_path / "run", task="text", data=own)
    two = tmp_path / "two.csv"
    two.write_text("".join(line for line in own.read_text().splitlines(keepends=True) if not line.endswith("rant\n")))
    with pytest.raises(ValueError, match=r"trained on text, with 257 tokens and 3 classes; expected text.* 2 classes"):
        evaluate(EvaluateOptions("text", model=run / "best", data=two, device="cpu"))


@pytest.mark.parametrize(
    ("task", "name", "says"),
    [
        ("text", "none.csv", r"none\.csv, which does not exist: name a table of texts, or a prepared folder"),
        ("text", "none", r"none, which does not exist.*prepare text --from FILES"),
        ("text", "my.doc", r"my\.doc has an unsupported format"),
        ("listops", "my.doc", r"my\.doc, a file; expected a folder that `nystrom data prepare listops` made"),
    ],
)
def test_what_is_not_data_raises(small_run, tmp_path, task, name, says):
    (tmp_path / "my.doc").write_text("text,label\n")
    with pytest.raises(ValueError, match=says):
        small_run(tmp_path / "run", task=task, data=tmp_path / name)


@pytest.mark.parametrize(
    ("task", "says"),
    [
        ("text", "prepare text --from FILES --to data/text-demo --max-length 512`"),
        ("retrieval", "prepare retrieval --from FILES --to data/retrieval-demo --max-length 512`"),
        ("image", "prepare image --from FILES --to data/image`"),
    ],
)
def test_data_that_only_the_user_has_are_asked_for(small_run, tmp_path, monkeypatch, task, says):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=says):
        small_run(tmp_path / "run", task=task, data=None)


def test_texts_longer_than_the_model_raise_with_the_way_to_cut_them(own, small_run, tmp_path):
    prepare_text(own, tmp_path / "long", max_length=600)
    with pytest.raises(ValueError, match=r"a sample of 600 tokens .* 512 positions.*cut by --max-length"):
        small_run(tmp_path / "run", task="text", data=tmp_path / "long")


@pytest.mark.long
def test_columns_of_other_names_are_trained_on_and_scored(own, small_run, tmp_path):
    other = tmp_path / "other.csv"
    other.write_text(own.read_text().replace("text,label", "body,mood"))
    fields = {"text_field": "body", "label_field": "mood"}
    run = small_run(tmp_path / "run", task="text", data=other, **fields)
    tested = {row.quantity: row for row in read_rows(run / "rows.csv")}["test accuracy"]
    assert tested.command.endswith("--data other.csv --text-field body --label-field mood --to run")
    assert (
        evaluate(EvaluateOptions("text", model=run / "best", data=other, device="cpu", **fields)).value == tested.value
    )


def test_own_pairs_are_trained_on(small_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [f"{'ab'[i % 2] * (3 + i % 7)},{'ba'[i % 2] * (2 + i % 5)}{i},{'yes' if i % 2 else 'no'}" for i in range(80)]
    (tmp_path / "pairs.csv").write_text("\n".join(["one,two,same", *rows]) + "\n")
    fields = {"text_field": "one", "pair_field": "two", "label_field": "same"}
    run = small_run(tmp_path / "run", task="retrieval", data=tmp_path / "pairs.csv", steps=3, **fields)
    config = json.loads((run / "best" / "config.json").read_text())
    assert config["id2label"] == {"0": "no", "1": "yes"}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"task": "listops"}, "--text-field is 'body', but data .* is not a file of texts: leave it out"),
        ({"task": "text", "data": None}, "--text-field is 'body', but no data are named with --data: leave it out"),
    ],
)
def test_columns_of_prepared_data_raise(small_run, tmp_path, changes, says):
    with pytest.raises(ValueError, match=says):
        small_run(tmp_path / "run", text_field="body", **changes)


@pytest.mark.parametrize("task", ["listops", "retrieval", "image"])
def test_data_that_are_not_prepared_are_named_with_the_command_and_left_alone(small_run, tmp_path, task):
    raw = tmp_path / "release"
    raw.mkdir()
    (raw / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"release") as error:
        small_run(tmp_path / "run", task=task, data=raw)
    assert "delete" not in str(error.value).lower()
    assert (raw / "thesis.txt").read_text() == "mine"
    if task != "retrieval":
        assert f"nystrom data prepare {task} --from {raw} --to " in str(error.value)
