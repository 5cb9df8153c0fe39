import gzip

import pyarrow
import pytest
from pyarrow import parquet

from nystrom_lab.data.lra.texts.reviews import Text, prepare_text
from nystrom_lab.data.sources.split_files import files_of_splits, own_source, split_of
from nystrom_lab.data.store.header import SPLITS

WANTED = {"label_field": ("label",), "text_field": ("text",)}


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("train", "train"),
        ("basic_train", "train"),
        ("Train", "train"),
        ("valid", "validation"),
        ("imdb-dev", "validation"),
        ("new_aan_pairs.eval", "validation"),
        ("validation", "validation"),
        ("dev_matched", "validation"),
        ("dev_mismatched", "validation_mismatched"),
        ("train-00000-of-00002", "train"),
        ("train_mismatched", None),
        ("matched", None),
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
    found, over = files_of_splits([tmp_path], strict=True)
    assert found == {"train": [tmp_path / "x_train.jsonl.gz"], "test": [tmp_path / "x_test.csv"]}
    assert over == []


def test_parts_of_a_split_and_parquet_are_read(tmp_path):
    for part in range(2):
        (tmp_path / f"train-0000{part}-of-00002.csv").write_text(f"text,label\na{part},1\nb{part},0\n")
    table = pyarrow.table({"text": ["c", "d"], "label": [1, 0]})
    parquet.write_table(table, tmp_path / "dev.parquet")
    to = prepare_text(tmp_path, tmp_path / "to", test_share=0.5, progress=False)
    assert [len(Text(to, split)) for split in SPLITS] == [2, 2, 2]


def test_splits_that_the_arena_has_not_are_left_out_and_said(tmp_path):
    for name in ("train", "dev_matched", "dev_mismatched", "test"):
        (tmp_path / f"{name}.csv").write_text(f"text,label\n{name},1\n{name} too,0\n")
    source = own_source(tmp_path, WANTED)
    assert source.splits == SPLITS
    assert source.remarks == ("splits left out: validation_mismatched",)


def test_a_file_of_no_split_and_two_of_one_are_named(tmp_path):
    (tmp_path / "train.csv").touch()
    (tmp_path / "more.csv").touch()
    with pytest.raises(ValueError, match=r"more.csv names no split: its name must end in train, val or test"):
        own_source(tmp_path, WANTED)
    (tmp_path / "more.csv").rename(tmp_path / "train.tsv")
    with pytest.raises(ValueError, match=r"train.csv and .*train.tsv are both train: name a folder that has one"):
        own_source(tmp_path, WANTED)


def test_the_same_file_twice_is_named(tmp_path):
    for split in SPLITS:
        (tmp_path / f"{split}.csv").write_text(f"text,label\n{split},1\nb,0\n")
    (tmp_path / "val.csv").write_bytes((tmp_path / "train.csv").read_bytes())
    with pytest.raises(ValueError, match=r"train.csv and .*val.csv are the same file, so train and val would hold"):
        prepare_text(tmp_path, tmp_path / "to", progress=False)


def test_texts_without_training_texts_raise(tmp_path):
    (tmp_path / "test.csv").write_text("text,label\na,1\nb,0\n")
    with pytest.raises(ValueError, match="there are texts for test but none for train"):
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
        (
            dict.fromkeys(("train", "dev", "val"), labelled(("a", 0))),
            None,
            ", dev and .*, val are both validation",
        ),
    ],
)
def test_a_saved_data_set_that_cannot_be_used_is_named(tmp_path, save_arrow, data, classes, message):
    saved = save_arrow(data, classes and {"label": classes})
    with pytest.raises(ValueError, match=message):
        prepare_text(saved, tmp_path / "to", progress=False)


def test_a_missing_field_of_a_saved_data_set_is_named(save_arrow):
    saved = save_arrow(labelled(("a", 0)))
    with pytest.raises(ValueError, match=r"saved, train: there is no 'words' among the fields 'text', 'label', 'id'"):
        list(own_source(saved, WANTED | {"text_field": ("words",)}).rows(False))
