import gzip
import json
import lzma

import numpy as np
import pytest

from nystrom_lab.data.lra.texts import retrieval as lra_retrieval
from nystrom_lab.data.lra.texts.retrieval import Retrieval, prepare_retrieval
from nystrom_lab.data.store.token_files import SPLITS

PAIRS = {
    "train": [(b"1.0", b"one", b"two \"quoted'"), (b"0.0", b"two \"quoted'", b"b'three\\n'"), (b"1", b"one", b"one")],
    "eval": [(b"0", b"four", b"five"), (b"1", b"\xff\x00", b"gr\xc3\xbcn")],
    "test": [(b"1", b"six", b"seven"), (b"0", b"eight", b"six")],
}
NAMES = dict(zip(SPLITS, PAIRS, strict=True))


@pytest.fixture(autouse=True)
def few_published_pairs(monkeypatch):
    published = {split: len(PAIRS[name]) for split, name in NAMES.items()}
    monkeypatch.setattr(lra_retrieval, "RETRIEVAL_COUNTS", published)


def official(folder):
    folder.mkdir(parents=True)
    for name, pairs in PAIRS.items():
        lines = [b"\t".join([label, b"A00-1", b"A00-2", first, second]) for label, first, second in pairs]
        (folder / f"new_aan_pairs.{name}.tsv").write_bytes(b"\n".join(lines) + b"\n")
    return folder


def texts(data):
    return [tuple((tokens - 1).astype(np.uint8).tobytes() for tokens in sample["input_ids"]) for sample in data]


@pytest.mark.parametrize("inside", ["", "tsv_data", "lra_release/lra_release/tsv_data"])
def test_the_official_files_become_pairs(tmp_path, inside):
    official(tmp_path / "from" / inside)
    to = prepare_retrieval(tmp_path / "from", tmp_path / "to")
    for split, name in NAMES.items():
        data = Retrieval(to, split)
        assert texts(data) == [(first, second) for _, first, second in PAIRS[name]]
        assert data.labels.tolist() == [int(float(label)) for label, _, _ in PAIRS[name]]
        assert data.classes == ["0", "1"]
        assert data.lengths.tolist() == [max(len(first), len(second)) for _, first, second in PAIRS[name]]


def test_compressed_official_files_are_read(tmp_path):
    official(tmp_path / "from")
    for path in [*(tmp_path / "from").iterdir()]:
        path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    assert len(Retrieval(prepare_retrieval(tmp_path / "from", tmp_path / "to"), "train")) == 3


def test_a_document_of_many_pairs_is_stored_once(tmp_path):
    to = prepare_retrieval(official(tmp_path / "from"), tmp_path / "to")
    counted = json.loads((to / "dataset.json").read_text())["splits"]["train"]
    assert (counted["samples"], counted["sequences"]) == (3, 3)
    assert counted["tokens"] == len(b"one") + len(b"two \"quoted'") + len(b"b'three\\n'")


def test_documents_are_cut_before_they_are_compared(tmp_path):
    to = prepare_retrieval(official(tmp_path / "from"), tmp_path / "to", max_length=2)
    header = json.loads((to / "dataset.json").read_text())
    assert texts(Retrieval(to, "train")) == [(b"on", b"tw"), (b"tw", b"b'"), (b"on", b"on")]
    assert header["facts"]["truncated"] == {"train": 6, "val": 3, "test": 4}


def test_own_fields_are_named(tmp_path):
    rows = [{"a": f"x{i}", "b": f"y{i}", "gold": i % 3} for i in range(60)]
    path = tmp_path / "a.jsonl.xz"
    path.write_bytes(lzma.compress("\n".join(map(json.dumps, rows)).encode()))
    to = prepare_retrieval(path, tmp_path / "to", text_field="b", pair_field="a", label_field="gold")
    assert all(first[1:] == second[1:] and first[:1] == b"y" for first, second in texts(Retrieval(to, "train")))
    assert Retrieval(to, "val").num_labels == 3


@pytest.mark.parametrize(
    ("name", "line", "message"),
    [
        ("eval", b"1\tA\tB\tfirst", r"eval.tsv, line 3: 4 fields where 5 are wanted .* cut short"),
        ("eval", b"1\tA\tB\tfirst\tsecond\tthird", r"eval.tsv, line 3: 6 fields where 5 are wanted"),
        ("train", b"2\tA\tB\tfirst\tsecond", r"train.tsv, line 4: the label is '2': it must be 0 or 1"),
        ("test", b"1\tA\tB\tfirst\t", r"test.tsv, line 3: a text is empty"),
        ("test", b"1\tA\tB\tfirst\tsecond", "test has 3 samples where 2 were published"),
    ],
)
def test_a_broken_official_file_is_named(tmp_path, name, line, message):
    source = official(tmp_path / "from")
    with (source / f"new_aan_pairs.{name}.tsv").open("ab") as file:
        file.write(line)
    with pytest.raises(ValueError, match=message):
        prepare_retrieval(source, tmp_path / "to")
    assert not (tmp_path / "to").exists()


def test_an_official_file_that_is_missing_empty_or_there_twice_is_named(tmp_path):
    source = official(tmp_path / "from")
    val, test = source / "new_aan_pairs.eval.tsv", source / "new_aan_pairs.test.tsv"
    whole = val.read_bytes()
    val.write_bytes(b"")
    with pytest.raises(ValueError, match=r"new_aan_pairs.eval.tsv holds no rows below its header: add texts"):
        prepare_retrieval(source, tmp_path / "to")
    val.unlink()
    with pytest.raises(ValueError, match=r"lacks new_aan_pairs.eval.tsv: all three"):
        prepare_retrieval(source, tmp_path / "to")
    val.write_bytes(test.read_bytes())
    with pytest.raises(ValueError, match=r"eval.tsv and .*test.tsv are the same file, so val and test would hold"):
        prepare_retrieval(source, tmp_path / "to")
    val.write_bytes(whole)
    with pytest.raises(ValueError, match=r"is one of three official files: name their folder"):
        prepare_retrieval(test, tmp_path / "to")
    with pytest.raises(ValueError, match=r"--val-share is 0.1, but the source has a val split"):
        prepare_retrieval(source, tmp_path / "to", val_share=0.1)


def test_a_wrong_source_says_where_the_official_files_are(tmp_path):
    for source in (tmp_path / "gone", tmp_path):
        with pytest.raises(ValueError, match=r"name the folder of new_aan_pairs.train.tsv, .*lra_release.gz"):
            prepare_retrieval(source, tmp_path / "to")
