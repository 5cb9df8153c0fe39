"""Data sets of pairs, in small files of the same form as their authors publish them."""

import json

import pytest

from nystrom_lab.data.language.labelled.glue import TASKS, own_task
from nystrom_lab.data.language.labelled.splits import TextSplit, read_labelled
from nystrom_lab.data.lra.texts.retrieval import Retrieval, prepare_retrieval

KINDS = ("entailment", "neutral", "contradiction")


def jsonl(path, labels):
    """Write lines of SNLI 1.0 and MultiNLI 1.0; a pair on which the annotators did not agree has the label "-"."""
    rows = [
        {
            "annotator_labels": [label],
            "captionID": "1.jpg#0",
            "gold_label": label,
            "pairID": f"{i}",
            "sentence1": f'A "man" {path.stem} {i}.',
            "sentence1_binary_parse": "( A man )",
            "sentence1_parse": "(ROOT (NP A man))",
            "sentence2": f"He\tsleeps {i}.",
            "sentence2_binary_parse": "( He sleeps )",
            "sentence2_parse": "(ROOT (S He sleeps))",
        }
        for i, label in enumerate(labels)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_multinli(tmp_path):
    jsonl(tmp_path / "multinli_1.0_train.jsonl", KINDS)
    jsonl(tmp_path / "multinli_1.0_dev_matched.jsonl", ["neutral", "-", "-"])
    jsonl(tmp_path / "multinli_1.0_dev_mismatched.jsonl", ["-", "contradiction"])
    for name in ("multinli_1.0_train.txt", "paper.pdf", "README.txt"):
        (tmp_path / name).write_text("not read")
    data = read_labelled([tmp_path], TASKS["mnli"])
    dev = "multinli_1.0_dev_matched"
    assert data.splits["train"].labels == [0, 1, 2]
    assert data.splits["validation"] == ([f'A "man" {dev} 0.'], ["He\tsleeps 0."], [1])
    assert data.splits["validation_mismatched"].labels == [2]
    assert data.remarks == [
        f"{count} rows of {tmp_path}/multinli_1.0_dev_{name}.jsonl have the label '-', so the annotators did not "
        f"agree, and are left out (line {lines})"
        for count, name, lines in ((2, "matched", "2, 3"), (1, "mismatched", "1"))
    ]


def test_a_split_without_any_gold_label_is_refused(tmp_path):
    jsonl(tmp_path / "train.jsonl", ["-", "-"])
    for task, own in ((TASKS["mnli"], False), (own_task(pair_field="sentence2"), True)):
        with pytest.raises(ValueError, match=r"train.jsonl: all 2 labels are '-', so no row is left"):
            read_labelled([tmp_path], task, own=own)


def snli(folder):
    jsonl(folder / "snli_1.0_train.jsonl", [*KINDS, "-"] * 5)
    jsonl(folder / "snli_1.0_dev.jsonl", ["neutral", "-"])
    jsonl(folder / "snli_1.0_test.jsonl", ["-", "entailment", "neutral"])


def test_snli_as_its_authors_publish_it(tmp_path, capsys):
    snli(tmp_path)
    data = read_labelled([tmp_path], own_task(pair_field="sentence2"), own=True)
    assert data.classes == ("contradiction", "entailment", "neutral")
    assert {name: split.labels for name, split in data.splits.items()} == {
        "train": [1, 2, 0] * 5,
        "validation": [2],
        "test": [1, 2],
    }
    assert data.summary() == (
        "train 15, validation 1, test 2; 3 classes: 'contradiction' 5, 'entailment' 6, 'neutral' 7."
    )
    assert len(data.remarks) == 3
    # Training on bytes reads the same rows.
    to = prepare_retrieval(tmp_path, tmp_path / "to")
    assert Retrieval(to, "train").labels.tolist() == [1, 2, 0] * 5
    said = capsys.readouterr().err
    assert "3 classes: 'contradiction' 5, 'entailment' 6, 'neutral' 7." in said
    assert "5 rows of " in said
    assert "have the label '-', so the annotators did not agree, and are left out" in said


def test_snli_of_glue(tmp_path):
    parses = "sentence1_binary_parse sentence2_binary_parse sentence1_parse sentence2_parse"
    for name, votes in (("train", 1), ("dev", 5)):
        columns = f"index captionID pairID {parses} sentence1 sentence2".split()
        columns += [*(f"label{i + 1}" for i in range(votes)), "gold_label"]
        rows = [
            [
                str(i),
                "1.jpg#0",
                "1",
                "( A )",
                "( B )",
                "(A)",
                "(B)",
                f'A "{name} {i}',
                "He sleeps.",
                *[kind] * votes,
                kind,
            ]
            for i, kind in enumerate(KINDS)
        ]
        (tmp_path / f"{name}.tsv").write_text("".join("\t".join(row) + "\n" for row in [columns, *rows]))
    data = read_labelled([tmp_path], own_task(pair_field="sentence2"), own=True)
    assert data.splits["validation"] == ([f'A "dev {i}' for i in range(3)], ["He sleeps."] * 3, [1, 2, 0])


STSB = {
    "sts-train.csv": (
        'main-captions\tMSRvid\t2012test\t0001\t5.000\tA plane, "an old one, takes off.\tAn air plane is taking off.\n'
        "main-news\tMSRpar\t2012train\t0002\t0.250\tfirst, second\tthird\thttp://a.example\thttp://b.example\n"
    ),
    "sts-dev.csv": "main-captions\tMSRvid\t2012test\t0000\t3.8\tA girl is styling her hair.\tA girl brushes it.\n",
    "sts-test.csv": "main-forums\tdeft-forum\t2014\t0003\t2\tWhat for?\tWhy?\n",
}


def test_stsb_as_its_authors_publish_it(tmp_path):
    for name, content in STSB.items():
        (tmp_path / name).write_text(content)
    splits = read_labelled([tmp_path], TASKS["stsb"]).splits
    assert splits == {
        "train": TextSplit(
            ['A plane, "an old one, takes off.', "first, second"], ["An air plane is taking off.", "third"], [5.0, 0.25]
        ),
        "validation": TextSplit(["A girl is styling her hair."], ["A girl brushes it."], [3.8]),
        "test": TextSplit(["What for?"], ["Why?"], [2.0]),
    }


@pytest.mark.parametrize("row", ["main-news\tMSRpar\t2012train\t0002\t0.250\tfirst, second\n", "a,b\n"])
def test_a_row_of_stsb_that_is_cut_short_is_named(tmp_path, row):
    (tmp_path / "sts-train.csv").write_text(STSB["sts-train.csv"] + row)
    with pytest.raises(ValueError, match=r"sts-train.csv, line 3: [16] fields where 7 are wanted"):
        read_labelled([tmp_path], TASKS["stsb"])


def test_a_dash_in_another_column_is_refused(tmp_path):
    rows = [{"label": label, "sentence": f"text {i}"} for i, label in enumerate([*KINDS, "-"] * 5)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match="line 4: the label is '-', which means that there is none"):
        read_labelled([tmp_path], own_task(), own=True)
