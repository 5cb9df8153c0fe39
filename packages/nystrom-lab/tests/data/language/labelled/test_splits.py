"""Splits come from files, and those that are missing are drawn and announced."""

import json

import pytest

from nystrom_lab.data.language.labelled.glue import TASKS, own_task
from nystrom_lab.data.language.labelled.splits import read_labelled


def write_rows(path, rows):
    path.write_text("".join(json.dumps({k: v for k, v in row.items() if v is not None}) + "\n" for row in rows))


def write(path, labels, *, start=0):
    write_rows(path, [{"sentence": f"text {start + i}", "label": label} for i, label in enumerate(labels)])


def read_own(path, **options):
    return read_labelled([path], own_task(), own=True, **options)


def sizes(data):
    return {name: len(split.texts) for name, split in data.splits.items()}


def test_labelled_rows_for_validation_alone_are_split_and_it_says_so(tmp_path):
    write(tmp_path / "dev.jsonl", [0, 1] * 50)
    data = read_labelled([tmp_path], TASKS["sst2"])
    assert sizes(data) == {"train": 80, "validation": 10, "test": 10}
    assert not data.published
    assert "not the published split" in data.remarks[0]
    texts = [text for split in data.splits.values() for text in split.texts]
    assert sorted(texts) == sorted(f"text {i}" for i in range(100))
    # The rows keep their labels.
    assert all(
        label == int(text.split()[1]) % 2
        for split in data.splits.values()
        for text, label in zip(split.texts, split.labels, strict=True)
    )
    assert read_labelled([tmp_path], TASKS["sst2"]).fingerprint() == data.fingerprint()
    write(tmp_path / "test.jsonl", [1] * 5)
    assert sizes(read_labelled([tmp_path], TASKS["sst2"])) == {"train": 90, "validation": 10, "test": 5}


def test_validation_is_drawn_where_there_is_none_or_asked_for(tmp_path):
    write(tmp_path / "train.jsonl", [0, 1] * 20)
    write(tmp_path / "test.jsonl", [0, 1])
    assert sizes(read_labelled([tmp_path], TASKS["imdb"])) == {"train": 36, "validation": 4, "test": 2}
    write(tmp_path / "dev.jsonl", [0, 1])
    with pytest.raises(ValueError, match="validation and test with labels"):
        read_labelled([tmp_path], TASKS["sst2"], val_share=0.2)
    write(tmp_path / "test.jsonl", [None, None])
    drawn = read_labelled([tmp_path], TASKS["sst2"], val_share=0.2)
    assert sizes(drawn) == {"train": 32, "validation": 8, "test": 2, "submission": 2}


def test_equal_texts_are_in_one_of_the_splits_that_are_drawn(tmp_path):
    rows = [{"text": f"text {i // 3}", "label": i // 3 % 2} for i in range(300)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "dev.jsonl").write_text((tmp_path / "rows.jsonl").read_text())
    for data, wanted in (
        (tmp_path / "rows.jsonl", {"train", "validation"}),
        (tmp_path / "dev", {"train", "validation", "test"}),
    ):
        splits = read_labelled([data], own_task(), own=True).splits
        assert {*splits} == wanted
        assert sum(len(split.texts) for split in splits.values()) == 300
        found = [{*split.texts} for split in splits.values()]
        assert sum(map(len, found)) == 100, "each text in one of them"
        assert all(30 <= len(split.texts) <= 32 for name, split in splits.items() if name != "train")


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([("a", "x")], r"the only label is 'x' \(rows: 1\): add rows of another"),
        ([(f"text {i}", 1) for i in range(40)], r"the only label is '1' \(rows: 40\)"),
        ([("same", i % 2) for i in range(40)], r"40 texts, 1 of them different \(equal ones stay together\): too few"),
    ],
)
def test_rows_that_are_too_much_alike_are_called_so(tmp_path, rows, says):
    path = tmp_path / "train.jsonl"
    write_rows(path, [{"text": text, "label": label} for text, label in rows])
    with pytest.raises(ValueError, match=says):
        read_own(path)


def test_texts_that_are_learned_from_and_scored_are_told_and_copies_of_a_split_refused(tmp_path):
    write(tmp_path / "train.jsonl", [0, 1] * 5)
    write(tmp_path / "dev.jsonl", [0, 1, 0], start=8)
    write(tmp_path / "test.jsonl", [0, 1], start=20)
    assert read_own(tmp_path).remarks == ["2 of the 3 texts of validation are also training texts"]
    write(tmp_path / "test.jsonl", [0, 1] * 5)
    with pytest.raises(ValueError, match=r"the same texts for training and as test: one of the files is a copy"):
        read_own(tmp_path)


def test_matched_and_mismatched_are_kept_apart(tmp_path):
    for name, size in (("train", 3), ("dev_matched", 2), ("dev_mismatched", 1), ("test_matched", 4)):
        write_rows(tmp_path / f"{name}.jsonl", [{"premise": "a", "hypothesis": "b", "label": "neutral"}] * size)
    (tmp_path / "test_mismatched.tsv").write_text("index\tsentence1\tsentence2\n0\ta\tb\n")
    data = read_labelled([tmp_path], TASKS["mnli"])
    assert sizes(data) == {
        "train": 3, "validation": 2, "validation_mismatched": 1, "test": 4, "submission_mismatched": 1,
    }  # fmt: skip
    assert data.splits["train"].labels == [1, 1, 1]


@pytest.mark.parametrize(
    ("labels", "kind", "wanted"),
    [
        ([10, 9, 1], None, ("1", "9", "10")),
        ([10, 9, 1], "numbers", None),
        ([1, 2.5], None, None),
        ([1, "x"], "numbers", "line 2: the label is 'x'; expected a number"),
        (["0.5", "1.5", "nan"], None, "line 3: the label is 'nan', which means that there is none"),
        (["0.5", "1.5", "nan"], "classes", ("0.5", "1.5", "nan")),
    ],
)
def test_labels_of_own_texts_are_classes_or_numbers(tmp_path, labels, kind, wanted):
    write(tmp_path / "train.jsonl", labels * 10)
    options = {} if kind is None else {"kind": kind}
    if isinstance(wanted, str):
        with pytest.raises(ValueError, match=wanted):
            read_own(tmp_path, **options)
        return
    found = read_own(tmp_path, **options)
    assert found.classes == wanted
    assert wanted is not None or {*found.splits["train"].labels} == {*map(float, labels)}


def test_files_that_say_no_split_are_errors_for_own_texts_and_passed_over_for_glue(tmp_path):
    write(tmp_path / "train.jsonl", [0, 1] * 10)
    write(tmp_path / "dev_ids.jsonl", [0, 1])
    assert "dev_ids.jsonl is not a split" in read_labelled([tmp_path], TASKS["imdb"]).remarks[0]
    with pytest.raises(ValueError, match="names no split"):
        read_own(tmp_path)
    with pytest.raises(ValueError, match="which does not exist"):
        read_labelled([tmp_path / "none"], TASKS["sst2"])


def test_the_matched_and_mismatched_splits_of_a_saved_data_set_are_kept_apart(save_arrow):
    names = ("train", "validation_matched", "validation_mismatched", "test_matched", "test_mismatched")
    parts = {
        name: {"premise": ["a"], "hypothesis": [name]} | {"label": [-1 if name.startswith("test") else 2]}
        for name in names
    }
    saved = save_arrow(parts, {"label": ["entailment", "neutral", "contradiction"]})
    splits = read_labelled([saved], TASKS["mnli"]).splits
    assert {*splits} == {"train", "validation", "validation_mismatched", "submission", "submission_mismatched"}
    assert splits["train"] == (["a"], ["train"], [2])
