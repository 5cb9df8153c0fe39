import gzip

import pytest

from nystrom_lab.data.lra.texts.reviews import Text, prepare_text
from nystrom_lab.data.sources.split_files import files_of_folder, saved_source, split_of
from nystrom_lab.data.store.header import SPLITS

WANTED = {"label_field": ("label",), "text_field": ("text",)}


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("train", "train"),
        ("basic_train", "train"),
        ("Train", "train"),
        ("valid", "val"),
        ("imdb-dev", "val"),
        ("new_aan_pairs.eval", "val"),
        ("validation", "val"),
        ("test", "test"),
        ("contest", None),
        ("train2", None),
        ("reviews", None),
    ],
)
def test_a_name_determines_its_split(name, split):
    assert split_of(name) == split


def test_files_are_found_by_their_names(tmp_path):
    for name in ("x_test.csv", "x_train.jsonl.gz", "readme.txt", ".train.csv"):
        (tmp_path / name).touch()
    assert files_of_folder(tmp_path) == {"train": tmp_path / "x_train.jsonl.gz", "test": tmp_path / "x_test.csv"}


def test_a_file_of_no_split_and_two_of_one_are_named(tmp_path):
    (tmp_path / "train.csv").touch()
    (tmp_path / "more.csv").touch()
    with pytest.raises(ValueError, match=r"more.csv names no split: its name must end in train, val or test"):
        files_of_folder(tmp_path)
    (tmp_path / "more.csv").rename(tmp_path / "train.tsv")
    with pytest.raises(ValueError, match=r"train.csv and .*train.tsv are both train: name a folder that has one"):
        files_of_folder(tmp_path)


def test_the_same_file_twice_is_named(tmp_path):
    for split in SPLITS:
        (tmp_path / f"{split}.csv").write_text(f"text,label\n{split},1\nb,0\n")
    (tmp_path / "val.csv").write_bytes((tmp_path / "train.csv").read_bytes())
    with pytest.raises(ValueError, match=r"train.csv and .*val.csv are the same file, so train and val would hold"):
        prepare_text(tmp_path, tmp_path / "to", progress=False)


def test_texts_without_training_texts_raise(tmp_path):
    (tmp_path / "test.csv").write_text("text,label\na,1\nb,0\n")
    with pytest.raises(ValueError, match="there are texts for test and none for train"):
        prepare_text(tmp_path, tmp_path / "to", progress=False)


def test_a_cut_file_keeps_nothing_half_made(tmp_path):
    (tmp_path / "train.csv.gz").write_bytes(gzip.compress(b"text,label\n" + b"a,1\nb,0\n" * 999)[:-4])
    with pytest.raises(ValueError, match=r"train.csv.gz cannot be unpacked"):
        prepare_text(tmp_path / "train.csv.gz", tmp_path / "to", progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["train.csv.gz"]


def labelled(*rows):
    return {"text": [text for text, _ in rows], "label": [label for _, label in rows], "id": [0] * len(rows)}


def test_a_saved_data_set_keeps_its_splits_and_the_names_of_its_labels(tmp_path, save_arrow):
    parts = {
        "train": labelled(*((f"text {i}", i % 2) for i in range(2500))),
        "validation": labelled(("\u00fc", 1)),
        "test": labelled(("t", 0)),
        "unsupervised": labelled(("u", -1)),
    }
    to = prepare_text(save_arrow(parts, {"label": ["pos", "neg"]}), tmp_path / "to", progress=False)
    assert [len(Text(to, split)) for split in SPLITS] == [2500, 1, 1]
    assert Text(to, "val").classes == ["neg", "pos"]
    assert Text(to, "val")[0]["labels"] == 0
    assert Text(to, "train").labels[:3].tolist() == [1, 0, 1]
    assert "splits left out: unsupervised" in (to / "dataset.json").read_text()


@pytest.mark.parametrize("test", [labelled(("t", -1), ("u", -1)), {"text": ["t"]}])
def test_a_saved_test_split_without_labels_is_left_out(tmp_path, save_arrow, capsys, test):
    train = labelled(*((f"text {i}", i % 2) for i in range(100)))
    saved = save_arrow({"train": train, "validation": labelled(("v", 1)), "test": test}, {"label": ["pos", "neg"]})
    to = prepare_text(saved, tmp_path / "to", progress=False)
    assert [len(Text(to, split)) for split in SPLITS] == [90, 10, 1]
    assert "notice: saved, test has no labels and is left out" in capsys.readouterr().err.replace(f"{tmp_path}/", "")


def test_a_saved_data_set_of_one_part_is_split(tmp_path, save_arrow):
    saved = save_arrow(labelled(*((f"text {i}", i % 2 / 1) for i in range(100))))
    to = prepare_text(saved, tmp_path / "to", progress=False)
    assert [len(Text(to, split)) for split in SPLITS] == [80, 10, 10]
    assert Text(to, "train").classes == ["0", "1"]


@pytest.mark.parametrize(
    ("data", "classes", "message"),
    [
        (labelled(("a", 0), ("b", -1)), ["x", "y"], "saved, train, row 2: the label is -1, which has no name"),
        (labelled(("a", 0), (None, 1)), None, "saved, train, row 2: text is None; expected a text or a number"),
        (dict.fromkeys(("train", "dev", "val"), labelled(("a", 0))), None, "has dev and val, which are both val"),
    ],
)
def test_a_saved_data_set_that_cannot_be_used_is_named(tmp_path, save_arrow, data, classes, message):
    saved = save_arrow(data, classes and {"label": classes})
    with pytest.raises(ValueError, match=message):
        prepare_text(saved, tmp_path / "to", progress=False)


def test_a_missing_field_of_a_saved_data_set_is_named(save_arrow):
    saved = save_arrow(labelled(("a", 0)))
    with pytest.raises(ValueError, match=r"saved, train: there is no 'words' among the fields 'text', 'label', 'id'"):
        list(saved_source(saved, WANTED | {"text_field": ("words",)}).rows(False))
