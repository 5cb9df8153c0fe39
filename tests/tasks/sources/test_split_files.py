import gzip
import sys

import pytest

from nystrom.tasks.lra.texts.reviews import Text, prepare_text
from nystrom.tasks.sources.split_files import files_of_folder, saved_source, split_of
from nystrom.tasks.store.header import SPLITS

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


def test_a_saved_data_set_without_the_package_says_the_way_out(tmp_path, monkeypatch):
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train"]}')
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        ValueError, match="saved by Hugging Face datasets, which is not installed: pip install datasets"
    ):
        prepare_text(tmp_path, tmp_path / "to", progress=False)


class Part:
    """The part of `datasets.Dataset` that is used; a feature with names for its numbers, or none."""

    column_names = ("text", "label", "id")

    def __init__(self, rows, names=None):
        self.rows = rows
        self.features = {"label": type("Feature", (), {"names": names} if names else {})()}

    def __len__(self):
        return len(self.rows)

    def iter(self, batch_size):
        for start in range(0, len(self), batch_size):
            batch = self.rows[start : start + batch_size]
            yield {"text": [text for text, _ in batch], "label": [label for _, label in batch], "id": [0] * len(batch)}


def loads(monkeypatch, loaded):
    def load_from_disk(path):
        if isinstance(loaded, Exception):
            raise loaded
        return loaded

    monkeypatch.setitem(sys.modules, "datasets", type("Library", (), {"load_from_disk": staticmethod(load_from_disk)}))


@pytest.fixture
def saved(tmp_path):
    folder = tmp_path / "saved"
    folder.mkdir()
    (folder / "state.json").write_text("{}")
    return folder


def test_a_saved_data_set_keeps_its_splits_and_the_names_of_its_labels(tmp_path, saved, monkeypatch):
    names = ["pos", "neg"]
    parts = {
        "train": Part([(f"text {i}", i % 2) for i in range(2500)], names),
        "validation": Part([("\u00fc", 1)], names),
        "test": Part([("t", 0)], names),
        "unsupervised": Part([("u", -1)], names),
    }
    loads(monkeypatch, parts)
    to = prepare_text(saved, tmp_path / "to", progress=False)
    assert [len(Text(to, split)) for split in SPLITS] == [2500, 1, 1]
    assert Text(to, "val").classes == ["neg", "pos"]
    assert Text(to, "val")[0]["labels"] == 0
    assert Text(to, "train").labels[:3].tolist() == [1, 0, 1]
    assert "splits left out: unsupervised" in (to / "dataset.json").read_text()


@pytest.mark.parametrize("rows", [[("t", -1), ("u", -1)], []])
def test_a_saved_test_split_without_labels_is_left_out(tmp_path, saved, monkeypatch, capsys, rows):
    train = Part([(f"text {i}", i % 2) for i in range(100)], ["pos", "neg"])
    test = Part(rows, ["pos", "neg"]) if rows else type("Part", (Part,), {"column_names": ("text",)})([("t", 0)])
    loads(monkeypatch, {"train": train, "validation": Part([("v", 1)], ["pos", "neg"]), "test": test})
    to = prepare_text(saved, tmp_path / "to", progress=False)
    assert [len(Text(to, split)) for split in SPLITS] == [90, 10, 1]
    assert "notice: test has no labels and is left out" in capsys.readouterr().err


def test_a_saved_data_set_of_one_part_is_split(tmp_path, saved, monkeypatch):
    loads(monkeypatch, Part([(f"text {i}", i % 2 / 1) for i in range(100)]))
    to = prepare_text(saved, tmp_path / "to", progress=False)
    assert [len(Text(to, split)) for split in SPLITS] == [80, 10, 10]
    assert Text(to, "train").classes == ["0", "1"]


@pytest.mark.parametrize(
    ("loaded", "message"),
    [
        (Part([("a", 0), ("b", -1)], ["x", "y"]), "saved, train, row 2: the label is -1, which has no name"),
        (Part([("a", 0), (None, 1)]), "saved, train, row 2: text is None; expected a text or a number"),
        ({"train": Part([]), "dev": Part([]), "val": Part([])}, "has dev and val, which are both val"),
        (ValueError("no Arrow"), r"saved cannot be read by datasets \(no Arrow\): save it again"),
    ],
)
def test_a_broken_saved_data_set_is_named(tmp_path, saved, monkeypatch, loaded, message):
    loads(monkeypatch, loaded)
    with pytest.raises(ValueError, match=message):
        prepare_text(saved, tmp_path / "to", progress=False)


def test_a_missing_field_of_a_saved_data_set_is_named(saved, monkeypatch):
    loads(monkeypatch, Part([("a", 0)]))
    with pytest.raises(ValueError, match=r"saved, train: there is no 'words' among the fields 'text', 'label', 'id'"):
        list(saved_source(saved, WANTED | {"text_field": ("words",)}).rows(False))


def test_the_package_itself_is_read(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = {"text": [f"text {i}" for i in range(50)], "label": [i % 2 for i in range(50)]}
    table = datasets.table.InMemoryTable.from_pydict(rows)
    datasets.Dataset(table, fingerprint="0" * 16).save_to_disk(str(tmp_path / "saved"))
    to = prepare_text(tmp_path / "saved", tmp_path / "to", progress=False)
    assert [len(Text(to, split)) for split in SPLITS] == [40, 5, 5]
