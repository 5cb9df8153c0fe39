"""No row of a file is lost, whatever quotes it holds."""

import csv
import importlib
import json
import lzma
import shutil

import pytest

from nystrom_lab.data.language.labelled.glue import TASKS
from nystrom_lab.data.language.labelled.rows import read_rows, read_texts
from nystrom_lab.data.sources.saved_arrow import saved_parts

QUOTED = ['he said " no', '"', 'two "" here', 'it \'s "fine"', '" open at the start', "plain"]


def test_quotes_of_a_tsv_are_letters_and_no_row_is_lost(tmp_path):
    path = tmp_path / "train.tsv"
    path.write_text("sentence\tlabel\n" + "".join(f"{text}\t{i % 2}\n" for i, text in enumerate(QUOTED)))
    rows = read_rows([path], TASKS["sst2"], may_lack_labels=False)
    assert (rows.texts, rows.labels) == (QUOTED, ["0", "1"] * 3)
    assert rows.places(1) == f"{path}, line 3"
    with path.open(newline="") as file:
        # What the default of the csv module makes of the same file.
        assert len(list(csv.reader(file, delimiter="\t"))) < 1 + len(QUOTED)


def test_the_original_columns_of_each_task_are_found(tmp_path):
    headers = {
        "mrpc": "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String",
        "mnli": "index\tpromptID\tgenre\tsentence1_binary_parse\tsentence1\tsentence2\tlabel1\tgold_label",
        "qnli": "index\tquestion\tsentence\tlabel",
        "qqp": "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate",
        "stsb": "index\tgenre\tsentence1\tsentence2\tscore",
    }
    for task, header in headers.items():
        path = tmp_path / f"{task}.tsv"
        names = header.split("\t")
        # A byte order mark, as in GLUE's MRPC; the cell of each column is its name.
        path.write_text(f"\ufeff{header}\n{header}\n", encoding="utf-8")
        rows = read_rows([path], TASKS[task], may_lack_labels=False)
        assert (rows.texts[0], rows.pairs[0], rows.labels[0]) == (
            next(name for name in TASKS[task].texts if name in names),
            next(name for name in TASKS[task].pairs if name in names),
            next(name for name in TASKS[task].labels if name in names),
        )


def test_files_without_a_header_are_read_from_their_first_row(tmp_path):
    path = tmp_path / "train.tsv"
    path.write_text('gj04\t1\t\tOur "friends" won.\ngj04\t0\t*\tThem did.\n')
    rows = read_rows([path], TASKS["cola"], may_lack_labels=False)
    assert (rows.texts, rows.labels) == (['Our "friends" won.', "Them did."], ["1", "0"])
    packed = tmp_path / "dev.tsv.xz"
    packed.write_bytes(lzma.compress(b"1\twhy?\thow \xff?\t18\n"))
    rows = read_rows([packed], TASKS["qqp"], may_lack_labels=False)
    assert (rows.texts, rows.pairs, rows.labels) == (["why?"], ["how \ufffd?"], ["1"])
    assert "1 rows of" in rows.remarks[0]


@pytest.mark.parametrize(
    ("name", "first", "label"),
    [
        ("qqp", "0\tquestion a\tquestion b\t0", "0"),
        ("qqp", "1\tquestion a\tquestion a\t7", "1"),
        ("cola", "\t1\t\tquestion a", "1"),
    ],
)
def test_equal_cells_in_the_first_of_the_rows_are_no_columns_named_twice(name, first, label, tmp_path):
    path = tmp_path / "train.tsv"
    path.write_text(first + "\n" + {"qqp": "1\tc\td\t8\n", "cola": "gj04\t1\t\tc\n"}[name])
    for may_lack_labels in (False, True):
        rows = read_rows([path], TASKS[name], may_lack_labels=may_lack_labels)
        assert (rows.texts, rows.labels) == (["question a", "c"], [label, "1"])
    path.write_text("sentence\tlabel\tlabel\tsource\na\t1\t1\tb\n")
    with pytest.raises(ValueError, match="the header names label twice"):
        read_rows([path], TASKS["cola"], may_lack_labels=False)


def test_broken_rows_of_qqp_are_counted_and_those_of_other_tasks_are_errors(tmp_path):
    path = tmp_path / "train.tsv"
    path.write_text("question1\tquestion2\tis_duplicate\na\tb\t1\nc\nd\te\t0\n")
    rows = read_rows([path], TASKS["qqp"], may_lack_labels=False)
    assert rows.texts == ["a", "d"]
    assert "1 rows" in rows.remarks[0]
    assert "line 3" in rows.remarks[0]
    # A test is scored elsewhere by the numbers of its rows.
    with pytest.raises(ValueError, match="line 3: 1 fields where 3 are wanted"):
        read_rows([path], TASKS["qqp"], may_lack_labels=True)
    path.write_text("sentence1\tsentence2\tlabel\na\tb\tentailment\nc\n")
    with pytest.raises(ValueError, match="line 3: 1 fields where 3 are wanted"):
        read_rows([path], TASKS["rte"], may_lack_labels=False)


@pytest.mark.parametrize("label", [None, "-1", ""])
def test_a_test_split_may_be_without_labels(tmp_path, label):
    path = tmp_path / "test.csv"
    header, cell = ("", "") if label is None else (",label", f",{label}")
    path.write_text(f"index,sentence{header}\n0,a{cell}\n1,b{cell}\n")
    assert read_rows([path], TASKS["sst2"], may_lack_labels=True).labels is None


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "saved"])
def test_null_is_no_label_and_an_error_as_a_text(tmp_path, save_arrow, kind):
    def read(rows, *, may_lack_labels):
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        path = tmp_path / f"test.{kind}"
        if kind == "jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        elif kind == "parquet":
            parquet = pytest.importorskip("pyarrow.parquet")
            parquet.write_table(importlib.import_module("pyarrow").table(columns), path)
        else:
            shutil.rmtree(path, ignore_errors=True)
            (path,) = saved_parts(save_arrow(columns, to=path)).values()
        return read_rows([path], TASKS["sst2"], may_lack_labels=may_lack_labels)

    row = {"sentence": "a", "label": 1}
    assert read([row | {"label": None}] * 2, may_lack_labels=True).labels is None
    for may_lack_labels in (False, True):
        with pytest.raises(ValueError, match=r"(line|row) 2: the label is missing, but other rows have one"):
            read([row, row | {"label": None}], may_lack_labels=may_lack_labels)
    with pytest.raises(ValueError, match=r"(line|row) 2: sentence is None; expected a text or a number"):
        read([row, row | {"sentence": None}], may_lack_labels=False)


def test_a_label_that_some_rows_lack_is_named_and_a_column_without_any(tmp_path):
    path = tmp_path / "train.csv"
    path.write_text("sentence,label\na,\nb,\n")
    with pytest.raises(ValueError, match="no row has a label: name another column with --label-field"):
        read_rows([path], TASKS["sst2"], may_lack_labels=False)
    path.write_text("sentence,label\na,1\nb,\n")
    with pytest.raises(ValueError, match="line 3: the label is missing"):
        read_rows([path], TASKS["sst2"], may_lack_labels=False)


def test_single_texts_for_a_task_on_pairs_name_the_option(tmp_path):
    path = tmp_path / "train.csv"
    path.write_text("sentence1,label\na,1\n")
    with pytest.raises(ValueError, match=r"--pair-field\. This task is on pairs"):
        read_rows([path], TASKS["mrpc"], may_lack_labels=False)
    path.write_text("sentence,label\na,1\n")
    with pytest.raises(ValueError, match=r"--text-field\. This task is on pairs"):
        read_rows([path], TASKS["mrpc"], may_lack_labels=False)


@pytest.mark.parametrize("name", ["texts.txt", "texts.tsv"])
def test_rows_with_other_bytes_than_utf_8_are_counted(tmp_path, name):
    path, spoilt = tmp_path / name, []
    path.write_bytes(b"sentence\n" * (name != "texts.txt") + "plain\ncafé\nplain\n£\n".encode("latin-1"))
    texts = list(read_texts(path, TASKS["sst2"], spoilt))
    assert texts == [("plain",), ("caf\ufffd",), ("plain",), ("\ufffd",)]
    assert spoilt == [1, 3]


def test_parquet_is_read_or_the_error_says_what_reads_it(tmp_path):
    path = tmp_path / "train.parquet"
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError:
        path.write_bytes(b"PAR1")
        with pytest.raises(ValueError, match="pip install pyarrow"):
            read_rows([path], TASKS["sst2"], may_lack_labels=False)
        return
    pyarrow.parquet.write_table(pyarrow.table({"sentence": QUOTED, "label": [0, 1] * 3}), path)
    rows = read_rows([path], TASKS["sst2"], may_lack_labels=False)
    assert (rows.texts, rows.labels) == (QUOTED, ["0", "1"] * 3)


def test_a_plain_file_has_a_text_in_each_line(tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text('a "b\n\nc')
    assert list(read_texts(path, TASKS["sst2"], [])) == [('a "b',), ("",), ("c",)]
    with pytest.raises(ValueError, match="task is on pairs"):
        list(read_texts(path, TASKS["mrpc"], []))
    path.write_text("\ufefffirst\nsecond\n")
    assert list(read_texts(path, TASKS["sst2"], [])) == [("first",), ("second",)]
    path.write_text("first\n", encoding="utf-16")
    with pytest.raises(ValueError, match=r"texts\.txt is UTF-16: save it as UTF-8"):
        list(read_texts(path, TASKS["sst2"], []))


@pytest.mark.parametrize("ending", [".tsv", ".csv"])
def test_a_blank_line_between_the_rows_of_one_column_is_an_empty_text(ending, tmp_path):
    path = tmp_path / f"texts{ending}"
    path.write_text("\nsentence\n\nfirst\n\n\nfourth\n\n")
    assert list(read_texts(path, TASKS["sst2"], [])) == [("",), ("first",), ("",), ("",), ("fourth",)]
    separator = "\t" if ending == ".tsv" else ","
    path.write_text(f"sentence{separator}label\nfirst{separator}1\n\nsecond{separator}0\n")
    assert list(read_texts(path, TASKS["sst2"], [])) == [("first",), ("second",)]


def test_quotes_around_nothing_are_an_empty_text_wherever_they_are(tmp_path):
    path = tmp_path / "texts.csv"
    path.write_text('sentence\nfirst\n\n""\nfourth\n""\n\n')
    assert list(read_texts(path, TASKS["sst2"], [])) == [("first",), ("",), ("",), ("fourth",), ("",)]


def test_quotes_around_nothing_are_no_row_of_several_columns(tmp_path):
    path = tmp_path / "texts.csv"
    path.write_text('sentence,label\nfirst,1\n""\n')
    with pytest.raises(ValueError, match=r"texts\.csv, line 3: 1 fields where 2 are wanted"):
        list(read_texts(path, TASKS["sst2"], []))
