"""Users' own texts and pairs: their columns, labels and splits, and the reports of the preparation."""

import csv
import json

import pytest

from nystrom_lab.data.lra.texts.own_texts import prepare_own
from nystrom_lab.data.lra.texts.retrieval import Retrieval, prepare_retrieval
from nystrom_lab.data.lra.texts.reviews import Text, prepare_text
from nystrom_lab.data.store.token_files import SPLITS


def write(path, fields, rows):
    path.parent.mkdir(exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file, dialect="excel-tab" if path.suffix == ".tsv" else "excel")
        writer.writerow(fields)
        writer.writerows(rows)
    return path


def many(count=60):
    return [(f"text {i}", i % 2) for i in range(count)]


def counts(split, to):
    return [len(split(to, name)) for name in SPLITS]


@pytest.mark.parametrize(
    "classes", [["a", "b"], ["-1", "9", "10"], ["10", "9", "x"], ["unter", "\u00fcber"], [str(i) for i in range(300)]]
)
def test_labels_are_words_or_whole_numbers(tmp_path, capsys, classes):
    rows = [(f"{label}:{i}", f" {label} ") for i in range(12) for label in reversed(classes)]
    to = prepare_text(write(tmp_path / "a.csv", ("text", "label"), rows), tmp_path / "to")
    data = Text(to, "train")
    assert data.classes == classes
    for sample in data:
        text = bytes((sample["input_ids"] - 1).astype("uint8")).decode()
        assert classes[sample["labels"]] == text.rpartition(":")[0]
    assert f"{len(classes)} classes: {classes[0]!r} 12, {classes[1]!r} 12" in capsys.readouterr().err


def test_classes_that_the_draw_takes_from_training_are_said(tmp_path, capsys):
    rows = [(f"text {i}", f"c{i}" if i < 30 else f"c{i % 2}") for i in range(100)]
    to = prepare_text(write(tmp_path / "a.csv", ("text", "label"), rows), tmp_path / "to")
    unlearned = {*range(30)} - {*Text(to, "train").labels.tolist()}
    assert f"no training text has a label of {len(unlearned)} of the 30 classes." in capsys.readouterr().err
    assert unlearned


def test_test_texts_that_are_in_train_too_are_counted_in_the_summary(tmp_path, capsys):
    write(tmp_path / "from" / "train.csv", ("text", "label"), many())
    write(tmp_path / "from" / "test.csv", ("text", "label"), [*many()[:3], ("new", 1)])
    to = prepare_text(tmp_path / "from", tmp_path / "to")
    said = capsys.readouterr().err
    assert "warning: 3 of 4 samples of test are also in train." in said
    assert "2 classes: '0' 32, '1' 32" in said
    assert json.loads((to / "dataset.json").read_text())["facts"]["also_in_train"]["test"] == 3


def glue(folder):
    """A folder like those of GLUE: tsv files, with test texts without labels."""
    write(folder / "train.tsv", ("sentence", "label"), many())
    write(folder / "dev.tsv", ("sentence", "label"), [(f"dev {i}", i % 2) for i in range(8)])
    write(folder / "test.tsv", ("index", "sentence"), [(i, f"test {i}") for i in range(9)])
    return folder


def test_a_test_split_without_labels_is_left_out_and_reported(tmp_path, capsys):
    to = prepare_text(glue(tmp_path / "sst"), tmp_path / "to")
    assert counts(Text, to) == [54, 6, 8]
    assert {bytes((s["input_ids"] - 1).astype("uint8"))[:3] for s in Text(to, "test")} == {b"dev"}
    said = capsys.readouterr().err
    assert "test.tsv has no labels and is left out" in said
    assert "dev.tsv is the test split, and validation texts are drawn from the training texts" in said
    (tmp_path / "sst" / "dev.tsv").unlink()
    assert counts(Text, prepare_text(tmp_path / "sst", tmp_path / "drawn")) == [48, 6, 6]


def test_a_test_split_whose_labels_have_another_name_is_not_left_out(tmp_path):
    glue(tmp_path / "sst")
    write(tmp_path / "sst" / "train.tsv", ("sentence", "label"), [*many(), ("x", "")])
    with pytest.raises(ValueError, match=r"train.tsv, line 62: the label is missing, but other rows have one"):
        prepare_text(tmp_path / "sst", tmp_path / "to")


@pytest.mark.parametrize(
    "fields",
    [("Quality", "#1 String", "#2 String"), ("label", "question", "sentence"), ("LABEL", "premise", "hypothesis")],
)
def test_pairs_of_glue_are_found_by_their_columns(tmp_path, fields):
    rows = [(i % 2, f'one "{i}', f"two {i}") for i in range(60)]
    lines = ["\t".join(map(str, row)) for row in [fields, *rows]]
    (tmp_path / "a.tsv").write_text("\n".join(lines))
    data = Retrieval(prepare_retrieval(tmp_path / "a.tsv", tmp_path / "to"), "val")
    first, second = data[0]["input_ids"]
    assert bytes((first - 1).astype("uint8")).startswith(b'one "')
    assert bytes((second - 1).astype("uint8")).startswith(b"two ")


def test_own_files_are_prepared_once_under_a_name_of_their_content_and_fields(tmp_path):
    rows = [(i % 2, f"one {i}", f"two {i}") for i in range(60)]
    source = write(tmp_path / "my.csv", ("gold", "a", "b"), rows)
    fields = {"label_field": "gold", "text_field": "a", "pair_field": "b"}
    to = prepare_own("retrieval", source, under=tmp_path / "data", **fields)
    assert prepare_own("retrieval", source, under=tmp_path / "data", **fields) == to
    turned = fields | {"text_field": "b", "pair_field": "a"}
    other = prepare_own("retrieval", source, under=tmp_path / "data", **turned)
    assert other != to
    single = prepare_own("text", source, under=tmp_path / "data", label_field="gold", text_field="a")
    assert single.name.startswith("text-my-")
    assert len([*(tmp_path / "data").iterdir()]) == 3
    with pytest.raises(ValueError, match="--pair-field is 'b', but a sample of text is one text"):
        prepare_own("text", source, under=tmp_path / "data", **fields)


def test_documents_and_links_are_prepared_first(tmp_path):
    for name in ("documents.csv", "links.csv"):
        (tmp_path / name).write_text("a,b\n")
    with pytest.raises(ValueError, match=r"holds documents and links \(documents\.csv, links\.csv\), .*--from"):
        prepare_own("retrieval", tmp_path, under=tmp_path / "data")
    assert not (tmp_path / "data").exists()
