import csv
import gzip
import hashlib
import io
import json
import lzma
import tarfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nystrom_lab.data.lra.texts import reviews
from nystrom_lab.data.lra.texts.reviews import Text, prepare_text
from nystrom_lab.data.sources import acl_imdb
from nystrom_lab.data.store.token_files import SPLITS

REVIEWS = {
    "train": {"neg": [b"bad", b"gr\xc3\xbcn \xff\x00"], "pos": [b"good", b"fine<br />"]},
    "test": {"neg": [b"worse", b"worst"], "pos": [b"better", b"best"]},
}


@pytest.fixture(autouse=True)
def four_reviews_a_split(monkeypatch):
    """Take these as the published numbers."""
    for module in (acl_imdb, reviews):
        monkeypatch.setattr(module, "IMDB_COUNTS", {"train": 4, "test": 4})


def texts(data):
    return [(sample["input_ids"] - 1).astype(np.uint8).tobytes() for sample in data]


def header(folder):
    return json.loads((folder / "dataset.json").read_text())


def acl(folder):
    for split, labels in REVIEWS.items():
        for label, texts in labels.items():
            part = folder / split / label
            part.mkdir(parents=True)
            for number, text in enumerate(texts):
                # Numbers are in numerical order, which differs from that of letters: 9 before 10.
                (part / f"{number + 9}_7.txt").write_bytes(text)
    (folder / "train" / "unsup").mkdir()
    (folder / "train" / "unsup" / "0_0.txt").write_text("no class")
    (folder / "README").write_text("about")
    return folder


def packed(folder, archive, mode="w:gz"):
    with tarfile.open(archive, mode) as tar:
        tar.add(folder, arcname="aclImdb")
    return archive


def member(name, content=b"text", kind=tarfile.REGTYPE):
    info = tarfile.TarInfo(name)
    info.size, info.type = len(content), kind
    return info, io.BytesIO(content)


def own(path, rows, fields=("text", "label")):
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(fields)
        writer.writerows(rows)
    return path


def many(path, count=200, classes=2):
    return own(path, [(f"text {i}", f"c{i % classes}") for i in range(count)])


def check_imdb(to):
    for split in SPLITS:
        reviews = REVIEWS["test" if split == "val" else split]
        data = Text(to, split)
        assert texts(data) == reviews["neg"] + reviews["pos"]
        assert data.labels.tolist() == [0, 0, 1, 1]
        assert data.classes == ["neg", "pos"]


def test_the_folder_of_imdb_becomes_a_data_set_with_val_as_test(tmp_path):
    acl(tmp_path / "aclImdb")
    # From the folder itself, and from its parent.
    for number, source in enumerate((tmp_path / "aclImdb", tmp_path)):
        to = prepare_text(source, tmp_path / f"to{number}")
        check_imdb(to)
        assert header(to)["facts"]["val"].startswith("the test split once more, as in the official task")


@pytest.mark.parametrize(("ending", "mode"), [(".tar.gz", "w:gz"), (".tgz", "w:gz"), (".tar", "w:")])
def test_the_archive_gives_what_the_folder_gives(tmp_path, ending, mode):
    archive = packed(acl(tmp_path / "x"), tmp_path / f"aclImdb_v1{ending}", mode)
    check_imdb(prepare_text(archive, tmp_path / "to"))


def test_the_archive_is_found_in_its_folder_and_the_order_in_it_plays_no_part(tmp_path):
    (tmp_path / "from").mkdir()
    with tarfile.open(tmp_path / "from" / "aclImdb_v1.tar.gz", "w:gz") as tar:
        files = acl(tmp_path / "x").rglob("*.txt")
        for path in sorted(files, key=lambda path: path.name, reverse=True):
            tar.add(path, arcname=f"aclImdb/{path.relative_to(tmp_path / 'x')}")
    check_imdb(prepare_text(tmp_path / "from", tmp_path / "to"))


def test_a_share_draws_val_from_the_training_reviews_instead(tmp_path):
    to = prepare_text(acl(tmp_path / "aclImdb"), tmp_path / "to", val_share=0.25)
    assert {split: len(Text(to, split)) for split in SPLITS} == {"train": 3, "val": 1, "test": 4}
    assert header(to)["facts"]["val"] == "drawn from the training texts, share 0.25"
    wanted = REVIEWS["train"]["neg"] + REVIEWS["train"]["pos"]
    assert sorted(texts(Text(to, "train")) + texts(Text(to, "val"))) == sorted(wanted)


def test_imdb_in_files_of_rows_is_taken_as_imdb_on_request(tmp_path):
    source = tmp_path / "from"
    source.mkdir()
    for split, labels in REVIEWS.items():
        rows = [{"text": text.decode("latin-1"), "label": i} for i, of in enumerate(labels.values()) for text in of]
        (source / f"{split}.jsonl.xz").write_bytes(lzma.compress("\n".join(map(json.dumps, rows)).encode()))
    to = prepare_text(source, tmp_path / "to", imdb=True)
    assert texts(Text(to, "val")) == texts(Text(to, "test"))
    (source / "test.jsonl.xz").unlink()
    with pytest.raises(ValueError, match="--imdb is set, and the source has train: IMDB has train and test"):
        prepare_text(source, tmp_path / "other", imdb=True)


def test_wrong_counts_of_imdb_raise_or_warn(tmp_path, capsys):
    folder = acl(tmp_path / "aclImdb")
    (folder / "test" / "neg" / "9_7.txt").rename(folder / "test" / "pos" / "99_7.txt")
    (folder / "train" / "pos" / "10_7.txt").unlink()
    message = (
        "train has 3 samples where 4 were published; test has 1 of 'neg', 3 of 'pos' where 2 of each of two classes"
        " were published: a file is truncated or wrong"
    )
    with pytest.raises(ValueError, match=message):
        prepare_text(folder, tmp_path / "to")
    assert not (tmp_path / "to").exists()
    to = prepare_text(folder, tmp_path / "to", check_counts=False)
    assert "warning: train has 3 samples where 4 were published." in capsys.readouterr().err
    assert len(header(to)["facts"]["differences"]) == 2
    # Data made despite their counts do not count as complete later.
    with pytest.raises(ValueError, match=message):
        prepare_text(folder, to)


def test_a_missing_part_and_a_foreign_file_of_imdb_are_named(tmp_path):
    folder = acl(tmp_path / "aclImdb")
    (folder / "test" / "pos" / "copy of 9_7.txt").write_text("x")
    with pytest.raises(ValueError, match=r"test/pos/copy of 9_7.txt is not a review: their names are NUMBER_STARS.txt"):
        prepare_text(folder, tmp_path / "to")
    for path in (folder / "test" / "pos").iterdir():
        path.unlink()
    (folder / "test" / "pos").rmdir()
    with pytest.raises(ValueError, match=r"aclImdb lacks test/pos: unpack aclImdb_v1.tar.gz again"):
        prepare_text(folder, tmp_path / "to")


def test_an_archive_that_is_cut_short_is_named(tmp_path):
    archive = packed(acl(tmp_path / "x"), tmp_path / "aclImdb_v1.tar.gz")
    whole = archive.read_bytes()
    for kept in (whole[:-9], whole[: len(whole) // 2], whole[:15], b"", b"no archive"):
        archive.write_bytes(kept)
        with pytest.raises(ValueError, match=r"v1.tar.gz cannot be unpacked \(.*\): it is cut short or damaged"):
            prepare_text(archive, tmp_path / "to")
        assert not (tmp_path / "to").exists()


def test_the_checksum_at_the_very_end_of_an_archive_is_compared(tmp_path):
    tar = packed(acl(tmp_path / "x"), tmp_path / "x.tar", "w:").read_bytes() + bytes(3_000_000)
    whole = gzip.compress(tar)
    archive = tmp_path / "aclImdb_v1.tar.gz"
    archive.write_bytes(whole)
    check_imdb(prepare_text(archive, tmp_path / "to"))
    # The last eight bytes are a checksum and the length.
    archive.write_bytes(whole[:-8] + bytes(4) + whole[-4:])
    with pytest.raises(ValueError, match=r"cannot be unpacked \(CRC check failed"):
        prepare_text(archive, tmp_path / "other")


def test_hidden_files_of_an_archive_are_passed_over(tmp_path):
    archive = packed(acl(tmp_path / "x"), tmp_path / "aclImdb_v1.tar", "w:")
    with tarfile.open(archive, "a") as tar:
        tar.addfile(*member("aclImdb/train/pos/._9_7.txt"))
    check_imdb(prepare_text(archive, tmp_path / "to"))


# GNU tar writes a review of 200 MB that is one hole this way: 1 KB that no limit on the archive sees.
HOLE = member("aclImdb/train/pos/70_1.txt", b"")
HOLE[0].pax_headers = {"GNU.sparse.major": "0", "GNU.sparse.map": "209715200,0", "GNU.sparse.size": "209715200"}


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (member("aclImdb/../../train/pos/0_1.txt"), "is outside the archive's folder"),
        (member("/train/pos/0_1.txt"), "is outside the archive's folder"),
        (member("aclImdb/train/pos/0_1.txt", b"", tarfile.SYMTYPE), "0_1.txt is a link"),
        (member("aclImdb/train/neg/9_7.txt"), r"train/neg/9_7.txt is in the archive twice"),
        (member("aclImdb/train/neg/nine.txt"), r"nine.txt is not a review"),
        (member("aclImdb/train/neg/77_1.txt", b""), r"77_1.txt: a text is empty"),
        (HOLE, r"aclImdb_v1.tar, aclImdb/train/pos/70_1.txt is a sparse file"),
    ],
)
def test_an_archive_with_something_else_in_it_raises(tmp_path, entry, message):
    archive = packed(acl(tmp_path / "x"), tmp_path / "aclImdb_v1.tar", "w:")
    with tarfile.open(archive, "a", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(*entry)
    with pytest.raises(ValueError, match=message):
        prepare_text(archive, tmp_path / "to")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["aclImdb_v1.tar", "x"]


def test_own_texts_in_one_file_are_split_by_their_content(tmp_path):
    to = prepare_text(many(tmp_path / "a.csv", classes=3), tmp_path / "to")
    data = {split: Text(to, split) for split in SPLITS}
    assert {split: len(part) for split, part in data.items()} == {"train": 160, "val": 20, "test": 20}
    assert data["train"].num_labels == 3
    assert data["train"].classes == ["c0", "c1", "c2"]
    every = [text for part in data.values() for text in texts(part)]
    assert sorted(every) == sorted(f"text {i}".encode() for i in range(200))
    for part in data.values():
        for text, label in zip(texts(part), part.labels, strict=True):
            assert int(text.split()[1]) % 3 == label
    # Another order of the rows gives the same splits, another seed others.
    rows = [(f"text {i}", f"c{i % 3}") for i in reversed(range(200))]
    turned = prepare_text(own(tmp_path / "b.csv", rows), tmp_path / "turned")
    assert sorted(texts(Text(turned, "test"))) == sorted(texts(data["test"]))
    other = prepare_text(tmp_path / "a.csv", tmp_path / "other", seed=1)
    assert sorted(texts(Text(other, "test"))) != sorted(texts(data["test"]))


def test_the_manifest_counts(tmp_path):
    source = own(tmp_path / "a.csv", [("x" * (i + 1), "ab"[i % 4 == 0]) for i in range(40)])
    to = prepare_text(source, tmp_path / "to", max_length=30)
    found = header(to)
    assert sum(found["facts"]["truncated"].values()) == 10
    for split in SPLITS:
        data, counted = Text(to, split), found["splits"][split]
        counts = np.bincount(data.labels, minlength=2)
        assert (counted["samples"], counted["tokens"]) == (len(data), data.lengths.sum())
        assert counted["class_counts"] == counts.tolist()
        assert counted["class_shares"] == pytest.approx((counts / len(data)).tolist())
        assert data.lengths.max() <= 30
    assert found["settings"]["train_sha256"] == hashlib.sha256(source.read_bytes()).hexdigest()


@settings(deadline=None, max_examples=30)
@given(st.lists(st.binary(min_size=1, max_size=60), min_size=8, max_size=8, unique=True))
def test_any_bytes_come_back(tmp_path_factory, contents):
    folder = tmp_path_factory.mktemp("bytes")
    for i, content in enumerate(contents):
        part = folder / "from" / ("train", "test")[i // 4] / ("neg", "pos")[i // 2 % 2]
        part.mkdir(parents=True, exist_ok=True)
        (part / f"{i}_1.txt").write_bytes(content)
    to = prepare_text(folder / "from", folder / "to")
    assert texts(Text(to, "train")) + texts(Text(to, "test")) == contents
    for split in ("train", "test"):
        for sample in Text(to, split):
            assert sample["input_ids"].min() >= 1
            assert sample["input_ids"].max() <= 256


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([("a", "x"), ("b", "y")], "^2 texts: too few to draw test and val from them"),
        ([(i, f"l{i}") for i in range(1001)], "line 2: the labels have 1001 values, more than 1000: name the column"),
        (
            [(i, "x") for i in range(50)] + [("b", "y")],
            "^no training text has the label 'y', after the draw",
        ),
    ],
)
def test_texts_that_make_no_data_set_raise(tmp_path, rows, message):
    source = own(tmp_path / "a.csv", rows)
    # With this seed the only text of class y is in the test split.
    seed = next(seed for seed in range(99) if message[:3] != "^no" or in_test(tmp_path, seed))
    with pytest.raises(ValueError, match=message):
        prepare_text(source, tmp_path / "to", seed=seed)
    assert not (tmp_path / "to").exists()


def in_test(tmp_path, seed):
    rows = [(i, "xy"[i % 2]) for i in range(50)] + [("b", "y")]
    to = prepare_text(own(tmp_path / "with_b.csv", rows), tmp_path / f"seed{seed}", seed=seed)
    return b"b" in texts(Text(to, "test"))


def test_empty_texts_are_left_out_and_counted_on_request(tmp_path):
    source = own(tmp_path / "a.csv", [("" if i % 10 == 0 else f"t{i}", i % 2) for i in range(100)])
    to = prepare_text(source, tmp_path / "to", skip_empty=True)
    assert sum(len(Text(to, split)) for split in SPLITS) == 90
    assert header(to)["facts"]["skipped"] == 10
    with pytest.raises(ValueError, match="skip_empty=True there and False asked for"):
        prepare_text(source, to)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_length": 0}, "--max-length is 0"),
        ({"seed": -1}, "--seed is -1"),
        ({"seed": 10**160}, "--seed is 1000.*; expected a whole number from 0 to 9223372036854775807"),
        ({"val_share": 0.0}, "--val-share is 0.0"),
        ({"test_share": 1.5}, "--test-share is 1.5; expected"),
        ({"val_share": 0.5, "test_share": 0.5}, "leave nothing to train on"),
        ({"text_field": "words"}, "no 'words' among the fields 'text', 'label': name the right one with --text-field"),
    ],
)
def test_an_impossible_setting_raises(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        prepare_text(many(tmp_path / "a.csv"), tmp_path / "to", **options)
    assert not (tmp_path / "to").exists()


def test_a_wrong_source_says_what_is_read_and_where_imdb_is_published(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.docx").touch()
    says = {"gone": "does not exist", "empty": "holds no readable texts", "a.docx": "has an unsupported format"}
    for name, came in says.items():
        with pytest.raises(ValueError, match=rf"{name} {came}.*aclImdb_v1.tar.gz \(IMDB, https://ai.stanford.edu/"):
            prepare_text(tmp_path / name, tmp_path / "to")
