import gzip

import pytest

from nystrom_lab.data.lra.texts.reviews import Text, prepare_text
from nystrom_lab.data.sources.columns import own_columns
from nystrom_lab.data.sources.labelled_files import find_arena_texts
from nystrom_lab.data.sources.split_files import split_of
from nystrom_lab.data.store.token_files import SPLITS

NAMES = {
    "train": ("train", "basic_train", "Train", "train-00000-of-00002"),
    "validation": ("valid", "imdb-dev", "new_aan_pairs.eval", "validation", "dev_matched"),
    "validation_mismatched": ("dev_mismatched",),
    "test": ("test",),
    None: ("train_mismatched", "matched", "contest", "train2", "reviews"),
}


@pytest.mark.parametrize(("name", "split"), [(name, split) for split, names in NAMES.items() for name in names])
def test_a_name_determines_its_split(name, split):
    assert split_of(name) == split


def test_splits_that_the_arena_has_not_are_left_out_and_said(tmp_path):
    for name in ("train", "dev_matched", "dev_mismatched", "test"):
        (tmp_path / f"{name}.csv").write_text(f"text,label\n{name},1\n{name} too,0\n")
    source = find_arena_texts(tmp_path, own_columns(pairs=False))
    assert source.splits == SPLITS
    assert source.remarks == ["splits left out: validation_mismatched"]


def test_a_folder_of_mismatched_pairs_alone_has_no_training(tmp_path):
    (tmp_path / "dev_mismatched.csv").write_text("text,label\na,1\nb,0\n")
    with pytest.raises(ValueError, match="none for training: add some"):
        prepare_text(tmp_path, tmp_path / "to")


def test_a_cut_file_keeps_nothing_half_made(tmp_path):
    (tmp_path / "train.csv.gz").write_bytes(gzip.compress(b"text,label\n" + b"a,1\nb,0\n" * 999)[:-4])
    with pytest.raises(ValueError, match=r"train.csv.gz cannot be unpacked"):
        prepare_text(tmp_path / "train.csv.gz", tmp_path / "to")
    assert [path.name for path in tmp_path.iterdir()] == ["train.csv.gz"]


def labelled(*rows):
    return {"text": [text for text, _ in rows], "label": [label for _, label in rows], "id": [0] * len(rows)}


@pytest.mark.parametrize("test", [labelled(("t", -1), ("u", -1)), {"text": ["t"]}])
def test_a_saved_test_split_without_labels_is_left_out(tmp_path, save_arrow, capsys, test):
    train = labelled(*((f"text {i}", i % 2) for i in range(100)))
    saved = save_arrow({"train": train, "validation": labelled(("v", 1)), "test": test}, {"label": ["pos", "neg"]})
    to = prepare_text(saved, tmp_path / "to")
    assert [len(Text(to, split)) for split in SPLITS] == [90, 10, 1]
    assert "notice: saved, test has no labels and is left out" in capsys.readouterr().err.replace(f"{tmp_path}/", "")


def test_a_saved_data_set_of_one_part_is_split(tmp_path, save_arrow):
    saved = save_arrow(labelled(*((f"text {i}", i % 2 / 1) for i in range(100))))
    to = prepare_text(saved, tmp_path / "to")
    assert [len(Text(to, split)) for split in SPLITS] == [80, 10, 10]
    assert Text(to, "train").classes == ["0", "1"]
