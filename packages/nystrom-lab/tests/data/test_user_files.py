"""Files of users: one row a kind, with what is read from it or the one line that refuses it."""

import bz2
import gzip
import json
import lzma

import pyarrow
import pytest
from pyarrow import parquet

from nystrom_lab.data.language.encoder_texts import read_prose
from nystrom_lab.data.language.labelled.glue import TASKS, own_task
from nystrom_lab.data.language.labelled.rows import decoded, read_texts
from nystrom_lab.data.language.labelled.splits import read_labelled
from nystrom_lab.data.lra.texts.reviews import Text, prepare_text
from nystrom_lab.data.sources.corpora import find_corpora
from nystrom_lab.data.sources.labelled_files import labelled_files
from nystrom_lab.data.sources.row_files import read_fields
from nystrom_lab.data.store.token_files import SPLITS

# --- How a file is read: each gives plain Python values.


def rows(path, columns=None, **names):
    wanted = {"label_field": ("label", "Target"), "text_field": ("text", "Source")} | names
    read = read_fields(path, wanted, columns=columns)
    return [(line, *(field.decode("utf-8", errors="surrogateescape") for field in fields)) for line, fields in read]


def task(path, name="sst2", *, test=False):
    split = "test" if test else "train"
    source, spoilt = labelled_files({split: [path]}, TASKS[name]), []
    read = [*source.rows()]
    texts = [decoded(row.texts, number, spoilt) for number, row in enumerate(read)]
    labels = None if split in source.unlabelled else [row.label for row in read]
    found = ([text[0] if len(text) == 1 else text for text in texts], labels)
    return (*found, *(remark.replace(str(path), path.name) for remark in source.remarks), *([spoilt] if spoilt else []))


def splits(path, name=None, **options):
    found = read_labelled([path], own_task() if name is None else TASKS[name], own=name is None, **options)
    return {split: (part.texts, part.labels) for split, part in found.splits.items()}


def one_by_one(path, name="sst2"):
    spoilt = []
    return [" / ".join(text) for text in read_texts(path, TASKS[name], spoilt)], spoilt


def documents(path, **options):
    corpora, _ = find_corpora([path], **options)
    return [piece.text.decode() for corpus in corpora for piece in corpus.pieces()]


def prose(path):
    return [read_prose([path]).text.strip()]


def arena(path, **options):
    to = prepare_text(path, path.parent / "to", **options)
    return {
        split: [(bytes((item["input_ids"] - 1).astype("uint8")).decode(), item["labels"]) for item in Text(to, split)]
        for split in SPLITS
    }


# --- How a file is made.


def lines(*objects):
    return "".join(json.dumps(each) + "\n" for each in objects)


def as_parquet(**columns):
    return lambda path: parquet.write_table(pyarrow.table(columns), path)


def packed(codec, text):
    def make(path):
        with pyarrow.CompressedOutputStream(str(path), codec) as file:
            file.write(text.encode())

    return make


def saved(data, classes=None):
    """A folder that `save_to_disk` of Hugging Face datasets writes."""
    return lambda path, save_arrow: save_arrow(data, classes, to=path)


MANY = [(f"text {i}", i % 2) for i in range(6)]
CSV = 'id,label,text\r\n7,1,"grün, „ja“"\r\n8,0,"say ""no"""\r\n'
TSV = 'label\ttext\n1\tgrün, „ja“\n0\tsay "no"\n'
JSONL = '{"text": "gr\\u00fcn, „ja“", "label": 1}\n\n{"label": 0.0, "text": "say \\"no\\""}\n'
TWO = [("1", "grün, „ja“"), ("0", 'say "no"')]
QUOTED = ['he said " no', '"', 'two "" here', 'it \'s "fine"', '" open at the start', "plain"]
ONE_TSV, ONE_CSV = "sentence\tlabel\n", "sentence,label\n"
BOM = "\ufeff"
WIKI = " \n = Cats = \n \n A cat . \n \n = = Size = = \n \n <unk> small . \n \n = Dogs = \n \n A dog = pet . \n"


def at(*numbers):
    return [(number, *row) for number, row in zip(numbers, TWO, strict=True)]


# Files by name, the reader, what it is to give: values, or the message (a regular expression), and options.
# One file is named itself; of several, their folder.
# fmt: off
KINDS = {
    # CSV
    "csv": ({"a.csv": CSV}, rows, at(2, 3)),
    "csv without a last line end": ({"a.csv": CSV.removesuffix("\r\n")}, rows, at(2, 3)),
    "csv with a byte order mark": ({"a.csv": BOM + CSV}, rows, at(2, 3)),
    "csv, rows of several lines": (
        {"a.csv": 'label,text\n1,"a\nb"\n0,"c\r\n\r\nd"\n1,e\n'},
        rows,
        [(2, "1", "a\nb"), (4, "0", "c\r\n\r\nd"), (7, "1", "e")],
    ),
    "csv, bytes that are not UTF-8": ({"a.csv": b"label,text\n1,a\xffb\n"}, rows, [(2, "1", "a\udcffb")]),
    "csv, words that mean nothing elsewhere": (
        {"a.csv": "label,text\nNA,null\nNaN,\n2020-01-01,1e5\n"},
        rows,
        [(2, "NA", "null"), (3, "NaN", ""), (4, "2020-01-01", "1e5")],
    ),
    "csv, a text of two megabytes": ({"a.csv": f"label,text\n1,{'x' * 2**21}\n"}, rows, [(2, "1", "x" * 2**21)]),
    "csv, UTF-16": ({"a.csv": CSV.encode("utf-16")}, rows, "a.csv is UTF-16: save it as UTF-8"),
    "csv, empty": ({"a.csv": ""}, rows, "a.csv is empty: it must begin with a header line"),
    "csv, a row of fewer fields": (
        {"a.csv": "label,text\n1\n"},
        rows,
        r"a.csv, line 2: 1 fields where 2 are wanted \(label, text\), beginning '1'",
    ),
    "csv, a row of more fields": ({"a.csv": "label,text\n1,a\n0,b,c\n"}, rows, "a.csv, line 3: 3 fields where 2"),
    "csv, a quote that never ends": (
        {"a.csv": 'label,text\n1,a\n0,"b\nc\n1,d\n'},
        rows,
        "a.csv, line 3: the row is not CSV .*quote is missing, or .* cut short",
    ),
    "csv, letters behind a quote": ({"a.csv": 'label,text\n1,a\n0,"b"c\n'}, rows, "a.csv, line 3: the row is not CSV"),
    "csv, a column twice": ({"a.csv": "label,text,label\n"}, rows, "a.csv, line 1: .* the header names label twice"),
    "csv, an unwanted column twice": ({"a.csv": "id,label,text,id\n1,1,a,2\n"}, rows, [(2, "1", "a")]),
    "csv, semicolons": (
        {"a.csv": "label;text\n1;a\n"},
        rows,
        "line 1: the first line must name the columns, and there is no 'label' or",
    ),
    "csv, no such column": (
        {"a.csv": "label,words\n"},
        rows,
        r"no 'text' or 'Source' among the fields 'label', 'words': name .* --text-field",
    ),
    "csv, two such columns": (
        {"a.csv": "label,text,review\n"},
        rows,
        "there is both 'text' and 'review' among .*: name the right one with --text-field",
        {"text_field": ("text", "review")},
    ),
    "csv, a column that means something else beside the text": (
        {"a.csv": "label,source,text,score\n1,web,a,3\n"},
        rows,
        [(2, "1", "a")],
        {"label_field": ("score", "label")},
    ),
    "csv, one column twice": (
        {"a.csv": CSV},
        rows,
        r"--label-field, --text-field name one field twice \(text, text\)",
        {"label_field": ("text",), "text_field": ("text",)},
    ),
    "csv, a name in other letters": ({"a.csv": "TEXT,Label\na,1\n"}, rows, [(2, "1", "a")]),
    "csv, the exact name before another": (
        {"a.csv": "Body,body,label\na,b,1\n"},
        rows,
        [(2, "1", "b")],
        {"text_field": ("body",)},
    ),
    # Tab-separated values
    "tsv": ({"a.tsv": TSV}, rows, at(2, 3)),
    "tsv, blank lines and carriage returns": ({"a.tsv": TSV.replace("\n", "\r\n\r\n")}, rows, at(3, 5)),
    "tsv with a byte order mark": ({"a.tsv": BOM + TSV}, rows, at(2, 3)),
    "tsv, a carriage return inside": (
        {"a.tsv": b"label\ttext\r\n1\ta\r\r\n0\tb\rc\n"},
        rows,
        [(2, "1", "a\r"), (3, "0", "b\rc")],
    ),
    "tsv without a header": (
        {"a.tsv": "1\tx\tfirst\n0\ty\tsecond\n"},
        rows,
        [(1, "1", "first"), (2, "0", "second")],
        {"columns": ("label", "id", "text")},
    ),
    "tsv, empty": ({"a.tsv": "\n\n"}, rows, "a.tsv is empty"),
    "tsv, a row of fewer fields": (
        {"a.tsv": "label\ttext\n1\ta\n0 b\n"},
        rows,
        "a.tsv, line 3: 1 fields where 2 are wanted",
    ),
    "tsv, a row of more fields": ({"a.tsv": "label\ttext\n1\ta\tb\n"}, rows, "line 2: 3 fields where 2 are wanted"),
    # JSON lines
    "json lines": ({"a.jsonl": JSONL}, rows, at(1, 3)),
    "json lines, .ndjson": ({"a.ndjson": JSONL}, rows, at(1, 3)),
    "json lines, .json": ({"a.json": BOM + JSONL}, rows, at(1, 3)),
    "json, values": (
        {"a.jsonl": lines(*({"text": "t", "label": v} for v in ["a", 1, -2, 1.0, 0.5, True, False, 2**63]))},
        rows,
        [(i + 1, v, "t") for i, v in enumerate(["a", "1", "-2", "1", "0.5", "true", "false", str(2**63)])],
    ),
    "json, texts that look like dates": (
        {"a.jsonl": lines({"text": "2020-01-01", "label": 1}, {"text": "2021-01-01 10:00:00", "label": 1})},
        rows,
        [(1, "1", "2020-01-01"), (2, "1", "2021-01-01 10:00:00")],
    ),
    "json, a field more in some lines": (
        {"a.jsonl": lines({"text": "a", "label": 1}, {"text": "b", "label": 0, "extra": [1, {}]})},
        rows,
        [(1, "1", "a"), (2, "0", "b")],
    ),
    "json, cut short": (
        {"a.jsonl": '{"text": "a", "label": 1}\n{"text": "b", "la'},
        rows,
        "a.jsonl, line 2: the line is not valid JSON .* cut short",
    ),
    "json, a field missing in a line": (
        {"a.jsonl": lines({"text": "a", "label": 1}, {"text": "b"})},
        rows,
        "line 2: the field 'label' is missing",
    ),
    "json, a list": ({"a.jsonl": "\n[1, 2]\n"}, rows, r"line 2: the line holds a list; expected a JSON object"),
    "json, null": ({"a.jsonl": lines({"text": None, "label": 1})}, rows, "line 1: text is None; expected a text or"),
    "json, a list of texts": (
        {"a.jsonl": lines({"text": ["a", "b c"], "label": 1}, {"text": [], "label": 0})},
        rows,
        [(1, "1", "a\n\nb c"), (2, "0", "")],
    ),
    "json, a list of others": ({"a.jsonl": lines({"text": ["a", 1], "label": 1})}, rows, "text is .*; expected a text"),
    "json, a list as a label": ({"a.jsonl": lines({"text": "a", "label": ["1"]})}, rows, "label is .*; expected a t"),
    "json, no number": ({"a.jsonl": '{"text": "a", "label": NaN}\n'}, rows, "line 1: label is nan"),
    "json, half a character": ({"a.jsonl": '{"text": "\\ud83d", "label": 1}\n'}, rows, "text holds half a character"),
    "json, other bytes": ({"a.jsonl": b'{"text": "\xff", "label": 1}\n'}, rows, "line 1: the line is not UTF-8 "),
    "json, deep": ({"a.jsonl": "[" * 100_000}, rows, "line 1: the line is nested more than 100 deep"),
    "json, a name twice": ({"a.jsonl": '{"text": "a", "label": 1, "label": 0}\n'}, rows, "line 1: .* 'label' twice"),
    # Compressed files
    "csv.gz": ({"a.csv.gz": gzip.compress(CSV.encode())}, rows, at(2, 3)),
    "tsv.xz": ({"a.tsv.xz": lzma.compress(TSV.encode())}, rows, at(2, 3)),
    "jsonl.bz2": ({"a.jsonl.bz2": bz2.compress(JSONL.encode())}, rows, at(1, 3)),
    "csv.zst": ({"a.csv.zst": packed("zstd", CSV)}, rows, at(2, 3)),
    "jsonl.lz4": ({"a.jsonl.lz4": packed("lz4", JSONL)}, rows, at(1, 3)),
    "gz of two members and zeros": (
        {"a.tsv.gz": gzip.compress(b"label\ttext\n") + gzip.compress(b"1\ta\n") + bytes(64)},
        rows,
        [(2, "1", "a")],
    ),
    "gz cut short": (
        {"a.tsv.gz": gzip.compress(TSV.encode())[:-1]},
        rows,
        r"a.tsv.gz cannot be unpacked after line \d+ .*: it is cut short or damaged",
    ),
    "xz cut short": ({"a.tsv.xz": lzma.compress(TSV.encode())[:-9]}, rows, r"a.tsv.xz cannot be unpacked after line"),
    "bz2 of another kind": ({"a.tsv.bz2": b"nothing of that kind"}, rows, "a.tsv.bz2 cannot be unpacked after line 0"),
    "zst of another kind": ({"a.tsv.zst": b"nothing of that kind"}, rows, "a.tsv.zst cannot be unpacked after line 0"),
    "another kind of file": ({"a.txt": CSV}, rows, "a.txt has an unsupported format: its name must end in .csv"),
    "a zip archive": ({"a.csv.zip": CSV}, rows, "a.csv.zip has an unsupported format"),
    # A task's files, read for fine-tuning
    "glue, quotes are letters": (
        {"train.tsv": ONE_TSV + "".join(f"{text}\t{i % 2}\n" for i, text in enumerate(QUOTED))},
        task,
        (QUOTED, ["0", "1"] * 3),
    ),
    **{
        f"glue, columns of {name}": (
            {"a.tsv": f"{BOM}{head}\n{head}\n".replace(" | ", "\t")},
            task,
            ([texts], [label]),
            {"name": name},
        )
        for name, head, texts, label in (
            ("mrpc", "Quality | #1 ID | #2 ID | #1 String | #2 String", ("#1 String", "#2 String"), "Quality"),
            ("mnli", "index | sentence1 | sentence2 | label1 | gold_label", ("sentence1", "sentence2"), "gold_label"),
            ("qnli", "index | question | sentence | label", ("question", "sentence"), "label"),
            ("qqp", "id | qid1 | question1 | question2 | is_duplicate", ("question1", "question2"), "is_duplicate"),
            ("stsb", "index | genre | sentence1 | sentence2 | score", ("sentence1", "sentence2"), "score"),
        )
    },
    "glue, cola without a header": (
        {"train.tsv": 'gj04\t1\t\tOur "friends" won.\ngj04\t0\t*\tThem did.\n'},
        task,
        (['Our "friends" won.', "Them did."], ["1", "0"]),
        {"name": "cola"},
    ),
    "glue, equal cells in a first row": (
        {"train.tsv": "1\tquestion a\tquestion a\t7\n1\tc\td\t8\n"},
        task,
        ([("question a", "question a"), ("c", "d")], ["1", "1"]),
        {"name": "qqp"},
    ),
    "glue, a header with a name twice": (
        {"train.tsv": "sentence\tlabel\tlabel\tsource\na\t1\t1\tb\n"},
        task,
        "the header names label twice",
        {"name": "cola"},
    ),
    "glue, bytes that are not UTF-8": (
        {"dev.tsv.xz": lzma.compress(b"1\twhy?\thow \xff?\t18\n")},
        task,
        ([("why?", "how \ufffd?")], ["1"], [0]),
        {"name": "qqp"},
    ),
    "glue, broken rows of qqp": (
        {"train.tsv": "question1\tquestion2\tis_duplicate\na\tb\t1\nc\nd\te\t0\n"},
        task,
        ([("a", "b"), ("d", "e")], ["1", "0"], "1 rows of train.tsv lack fields and are left out (line 3)"),
        {"name": "qqp"},
    ),
    "glue, broken rows of a test": (
        {"test.tsv": "question1\tquestion2\tis_duplicate\na\tb\t1\nc\n"},
        task,
        "line 3: 1 fields where 3 are wanted",
        {"name": "qqp", "test": True},
    ),
    "glue, broken rows of another task": (
        {"train.tsv": "sentence1\tsentence2\tlabel\na\tb\tentailment\nc\n"},
        task,
        "line 3: 1 fields where 3 are wanted",
        {"name": "rte"},
    ),
    **{
        f"a test without labels, {what}": ({"test.csv": content}, task, (["a", "b"], None), {"test": True})
        for what, content in (
            ("no column", "index,sentence\n0,a\n1,b\n"),
            ("-1", ONE_CSV + "a,-1\nb,-1\n"),
            ("nothing", ONE_CSV + "a,\nb,\n"),
        )
    },
    "no label at all": ({"a.csv": ONE_CSV + "a,\nb,\n"}, task, "no row has a label: name another column"),
    "a label missing": ({"a.csv": ONE_CSV + "a,1\nb,\n"}, task, "line 3: the label is missing, but other rows have"),
    "no rows": ({"a.csv": ONE_CSV}, task, "a.csv holds no rows below its header: add texts, or fetch it again"),
    "single texts for pairs": (
        {"a.csv": "sentence1,label\na,1\n"},
        task,
        r"--pair-field\. This task is on pairs",
        {"name": "mrpc"},
    ),
    "parquet": ({"a.parquet": as_parquet(sentence=QUOTED, label=[0, 1] * 3)}, task, (QUOTED, ["0", "1"] * 3)),
    "parquet, no such column": ({"a.parquet": as_parquet(words=["a"])}, task, "a.parquet: there is no 'label' among"),
    "parquet, no column": ({"a.parquet": as_parquet()}, task, r"a.parquet: .* among the fields \(none\): name the"),
    "parquet, other bytes": (
        {"a.parquet": as_parquet(
            sentence=pyarrow.StringArray.from_buffers(1, *pyarrow.array([b"\xff"]).buffers()[1:]), label=[1]
        )},
        task,
        "a.parquet cannot be read after row 0 .*: save it as UTF-8",
    ),
    "parquet, a column twice": (
        {"a.parquet": lambda path: parquet.write_table(
            pyarrow.table([[1], ["a"], ["b"]], ["label", "sentence", "sentence"]), path
        )},
        task,
        "a.parquet: the header names sentence twice",
    ),
    "parquet, no such file": ({"a.parquet": b"PAR1"}, task, "a.parquet is not a parquet file, or is truncated"),
    **{
        f"{kind}, {what}": ({name: make(labels, texts)}, task, expected, {"test": test})
        for kind, name, make in (
            ("json", "a.jsonl", lambda labels, texts: lines(
                *({"sentence": text, "label": label} for text, label in zip(texts, labels, strict=True))
            )),
            ("parquet", "a.parquet", lambda labels, texts: as_parquet(sentence=texts, label=labels)),
        )
        for what, labels, texts, test, expected in (
            ("null labels of a test", [None, None], ["a", "b"], True, (["a", "b"], None)),
            ("a null label", [1, None], ["a", "b"], False, "(line|row) 2: the label is missing, but other rows"),
            ("a null text", [1, 1], ["a", None], False, "(line|row) 2: sentence is None; expected a text"),
        )
    },
    # Texts without labels, one by one
    "plain, a text a line": ({"a.txt": 'a "b\n\nc'}, one_by_one, (['a "b', "", "c"], [])),
    "plain with a byte order mark": ({"a.txt": BOM + "first\nsecond\n"}, one_by_one, (["first", "second"], [])),
    "plain, UTF-16": ({"a.txt": "a\n".encode("utf-16")}, one_by_one, "a.txt is UTF-16: save it as UTF-8"),
    "plain, for pairs": ({"a.txt": "a\n"}, one_by_one, "the task is on pairs: name a .tsv", {"name": "mrpc"}),
    "plain, other bytes": (
        {"a.txt": "plain\ncafé\n".encode("latin-1")},
        one_by_one,
        (["plain", "caf\ufffd"], [1]),
    ),
    "one column, other bytes": ({"a.tsv": b"sentence\nplain\ncaf\xe9\n"}, one_by_one, (["plain", "caf\ufffd"], [1])),
    "one column of tsv, blank lines": (
        {"a.tsv": "\nsentence\n\nfirst\n\n\nfourth\n\n"},
        one_by_one,
        (["", "first", "", "", "fourth"], []),
    ),
    "one column of csv, blank lines": (
        {"a.csv": "\nsentence\n\nfirst\n\n\nfourth\n\n"},
        one_by_one,
        (["", "first", "", "", "fourth"], []),
    ),
    "two columns, a blank line": ({"a.csv": ONE_CSV + "first,1\n\nsecond,0\n"}, one_by_one, (["first", "second"], [])),
    "one column, quotes around nothing": (
        {"a.csv": 'sentence\nfirst\n\n""\nfourth\n""\n\n'},
        one_by_one,
        (["first", "", "", "fourth", ""], []),
    ),
    "two columns, quotes around nothing": (
        {"a.csv": ONE_CSV + 'first,1\n""\n'},
        one_by_one,
        "a.csv, line 3: 1 fields where 2 are wanted",
    ),
    # Splits for fine-tuning
    "splits, all three": (
        {"train.jsonl": lines({"sentence": "a", "label": 0}, {"sentence": "b", "label": 1}),
         "dev.jsonl": lines({"sentence": "c", "label": "positive"}),
         "test.jsonl": lines({"sentence": "d"}),
         "notes.txt": "no rows"},
        splits,
        {"train": (["a", "b"], [0, 1]), "validation": (["c"], [1]), "submission": (["d"], None)},
        {"name": "sst2"},
    ),
    "splits, a label of another class": (
        {"train.csv": ONE_CSV + "a,0\nb,2\n", "dev.csv": ONE_CSV + "c,1\n"},
        splits,
        "train.csv, line 3: the label is '2', which is not one of the classes",
        {"name": "sst2"},
    ),
    "splits, a file of none": (
        {"train.csv": ONE_CSV + "a,0\nb,1\n", "more.csv": ONE_CSV},
        splits,
        "more.csv names no split: its name must end in train, val or test",
    ),
    "splits, lists of paragraphs": (
        {"dev.jsonl": lines({"sentence": ["c", "d"], "label": 1}), "train.parquet": as_parquet(
            sentence=[["a"], ["b", "b"]], label=[0, 1])},
        splits,
        {"train": (["a", "b\n\nb"], [0, 1]), "validation": (["c\n\nd"], [1])},
    ),
    "splits, two files of one": ({"train.csv": ONE_CSV, "train.tsv": ONE_TSV}, splits, "are both train: name a folder"),
    "splits, no training": ({"test.csv": ONE_CSV + "a,0\nb,1\n"}, splits, "no training split", {"name": "sst2"}),
    "splits, another kind of file": ({"a.docx": "x"}, splits, "a.docx, which has an unsupported format: .csv"),
    "saved by datasets": (
        {"saved": saved(
            {"train": {"text": ["a", "b"], "label": [0, 1]}, "validation": {"text": ["c"], "label": [1]},
             "test": {"text": ["d"], "label": [-1]}, "unsupervised": {"text": ["e"], "label": [-1]}},
            {"label": ["positive", "negative"]},
        )},
        splits,
        {"train": (["a", "b"], [0, 1]), "validation": (["c"], [1]), "submission": (["d"], None)},
    ),
    "saved, classes of a task by their names": (
        {"saved": saved({"train": {"text": ["a", "b"], "label": [0, 1]}, "dev": {"text": ["c"], "label": [1]}},
                        {"label": ["positive", "negative"]})},
        splits,
        {"train": (["a", "b"], [1, 0]), "validation": (["c"], [0])},
        {"name": "imdb"},
    ),
    "saved, a label without a name": (
        {"saved": saved({"train": {"sentence": ["a", "b"], "label": [0, -1]}}, {"label": ["negative", "positive"]})},
        splits,
        "saved, train, row 2: the label is '-1', which has no name: it marks a text without a label",
        {"name": "sst2"},
    ),
    "saved, no such column": (
        {"saved": saved({"train": {"sentence": ["a"]}})},
        splits,
        "train: there is no .*'label'.* among the fields 'sentence': name",
        {"name": "sst2"},
    ),
    "saved, single texts for pairs": (
        {"saved": saved({"train": {"sentence": ["a"], "label": [0]}})},
        splits,
        r"train: there is no .* with --text-field\. This task is on pairs",
        {"name": "mrpc"},
    ),
    "saved, two of one split": (
        {"saved": saved({name: {"sentence": ["a"], "label": [0]} for name in ("train", "dev", "validation")})},
        splits,
        ", dev and .*, validation are both validation: save one of them",
        {"name": "sst2"},
    ),
    "saved, no split": (
        {"saved": saved({"unsupervised": {"sentence": ["a"]}})},
        splits,
        "holds the splits unsupervised, and none of them is train",
        {"name": "sst2"},
    ),
    # Texts of the arena
    "arena, splits of several kinds": (
        {"my_train.csv": "text,label\n" + "".join(f"{t},{v}\n" for t, v in MANY),
         "dev.tsv": "Source\tTarget\nabc\t1\n",
         "test.jsonl.gz": gzip.compress(lines({"review": "xyz", "sentiment": 0}).encode())},
        arena,
        {"train": MANY, "val": [("abc", 1)], "test": [("xyz", 0)]},
    ),
    "arena, parts and parquet": (
        {"train-00000-of-00002.csv": "text,label\na,1\nb,0\n", "train-00001-of-00002.csv": "text,label\nc,1\n",
         "dev.parquet": as_parquet(text=["d"], label=[0]), "test.parquet": as_parquet(text=["e"], label=[1])},
        arena,
        {"train": [("a", 1), ("b", 0), ("c", 1)], "val": [("d", 0)], "test": [("e", 1)]},
    ),
    "arena, saved by datasets": (
        {"saved": saved(
            {"train": {"text": ["a", "b"], "label": [0, 1]}, "validation": {"text": ["ü"], "label": [1]},
             "test": {"text": ["t"], "label": [0]}, "unsupervised": {"text": ["u"], "label": [-1]}},
            {"label": ["pos", "neg"]},
        )},
        arena,
        {"train": [("a", 1), ("b", 0)], "val": [("ü", 0)], "test": [("t", 1)]},
    ),
    "arena, saved without a label's name": (
        {"saved": saved({"text": ["a", "b"], "label": [0, -1]}, {"label": ["x", "y"]})},
        arena,
        "saved, train, row 2: the label is '-1', which has no name",
    ),
    "arena, an empty text": (
        {"a.csv": "text,label\na,x\n,y\n"},
        arena,
        "a.csv, line 3: a text is empty: fill it in, or leave such rows out, which .* with --skip-empty",
    ),
    "arena, an empty label": ({"a.csv": "text,label\na,x\nb, \n"}, arena, "a.csv, line 3: the label is missing"),
    "arena, a label that is no text": (
        {"a.tsv": b"text\tlabel\na\t1\nb\t\xff\n"},
        arena,
        r"a.tsv, line 3: the label b'\\xff' is not UTF-8",
    ),
    "arena, one class": ({"a.csv": "text,label\na,x\nb,x\n"}, arena, r"line 2: the only label is 'x' \(rows: 2\): add"),
    "arena, no rows": ({"a.csv": "text,label\n"}, arena, "a.csv holds no rows below its header: add texts, or fetch"),
    "arena, the same file twice": (
        {"train.csv": "text,label\na,1\nb,0\n", "val.csv": "text,label\na,1\nb,0\n"},
        arena,
        "train.csv and .*val.csv are the same file, so train and val would hold",
    ),
    "arena, no training": ({"test.csv": "text,label\na,1\n", "dev.csv": "text,label\nc,1\n"}, arena, "none for train"),
    "arena, another kind of file": ({"a.docx": "x"}, arena, "a.docx has an unsupported format: name the folder"),
    # Raw texts
    "documents, rows of csv": (
        {"a.csv": 'id,Text\n1,"one\n\nmore"\n2,two\n3," "\n'},
        documents,
        ["one\n\nmore", "two"],
    ),
    "documents of several kinds": (
        {"b.tsv": "content\tlabel\nthree\t1\n", "c.jsonl.xz": lzma.compress(lines({"text": "four"}).encode()),
         "a.parquet": as_parquet(content=["one", "two"], label=[1, 2]), "d.md": "five", "x.png": b"\x89PNG\0"},
        documents,
        ["one", "two", "three", "four", "five"],
    ),
    "documents, lists of paragraphs": (
        {"a.jsonl": lines({"source": "web", "text": ["one", "more"]}),
         "b.parquet": as_parquet(text=[["two"], ["three", "four"]])},
        documents,
        ["one\n\nmore", "two", "three\n\nfour"],
    ),
    "documents, another column": ({"b.tsv": "content\tlabel\nthree\t1\n"}, documents, ["1"], {"text_field": "label"}),
    "documents, a blank line ends one": (
        {"a.txt": b"\xef\xbb\xbfone\r\nmore\r\n \t\r\n\r\n\ntwo\n= three =\n\n"},
        documents,
        ["one\r\nmore\r\n", "\ntwo\n= three =\n"],
    ),
    "documents of a file without an ending": ({"wiki": "text\n"}, documents, ["text\n"]),
    "documents, articles of WikiText": (
        {"a.tokens.gz": gzip.compress(WIKI.encode())},
        documents,
        [" = Cats = \n \n A cat . \n \n = = Size = = \n \n <unk> small . \n \n", " = Dogs = \n \n A dog = pet . \n"],
    ),
    "documents, every split of a saved data set": (
        {"saved": saved({"train": {"text": ["one", "", "two"]}, "test": {"text": ["x"] * 3}})},
        documents,
        ["one", "two", "x", "x", "x"],
    ),
    "documents, saved lines of WikiText": (
        {"saved": saved({"train": {"text": ["", " = Cats = \n", "", " A <unk> . \n", "", " = Dogs = \n"]}})},
        documents,
        [" = Cats = \n\n A <unk> . \n\n", " = Dogs = \n"],
    ),
    "documents, nothing": ({"x.png": b"\x89", "y.png": b"\x89"}, documents, "holds no readable texts: name files that"),
    "documents, blank": ({"a.txt": " \n\n"}, documents, "a.txt holds no text: all files are empty or blank"),
    "documents, no text": ({"a.txt": b"PK\x03\x04\x00\x00"}, documents, r"a.txt is not text \(byte 4 is 0\)"),
    "documents, other bytes": ({"a.txt": b"gr\xfcn"}, documents, r"a.txt is not UTF-8 text \(byte 2 is 0xfc\): save"),
    "documents, UTF-16": ({"a.txt": "a".encode("utf-16")}, documents, "a.txt is UTF-16: save it as UTF-8"),
    "documents, cut short": ({"a.txt.gz": gzip.compress(b"some text")[:-4]}, documents, "a.txt.gz cannot be unpacked"),
    "documents, no such column": (
        {"a.csv": "words\nx\n"},
        documents,
        "a.csv, line 1: .* among the fields 'words': name the right one with --text-field",
    ),
    "documents, null in a saved data set": (
        {"saved": saved({"train": {"text": ["a", None], "title": ["b", "c"]}})},
        documents,
        "saved, train, row 2: text is None",
    ),
    "documents, a broken file among others": (
        {"a.txt": "text", "b.jsonl": "[1]\n"},
        documents,
        "b.jsonl, line 1: the line holds a list",
    ),
    "prose": ({"a.txt": "Die Brücke.\n"}, prose, ["Die Brücke."]),
    "prose, compressed": ({"a.txt.xz": lzma.compress("Die Brücke.".encode())}, prose, ["Die Brücke."]),
    "prose, cut short": ({"a.txt.xz": lzma.compress(b"some text" * 100)[:-20]}, prose, "a.txt.xz cannot be unpacked"),
    "prose, bytes that are no text": ({"a.txt": bytes(range(256)) * 12_000}, prose, "byte 0 is 0"),
    "prose, blank": ({"a.txt": "  \n"}, prose, "a.txt is empty"),
    "prose, UTF-16": ({"a.txt": ("hello " * 600_000).encode("utf-16")}, prose, "is UTF-16"),
    "prose, late other bytes": (
        {"a.txt": b"plain " * 20_000 + "café naïve ".encode("latin-1") * 300_000},
        prose,
        "is not UTF-8 text .* at byte 120003",
    ),
}
# fmt: on


@pytest.mark.parametrize("kind", KINDS)
def test_a_users_file_is_read_or_refused_in_one_line(kind, tmp_path, save_arrow):
    files, read, wanted, *options = KINDS[kind]
    folder = tmp_path / "files"
    folder.mkdir()
    for name, content in files.items():
        if isinstance(content, (str, bytes)):
            (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
        else:
            content(folder / name, *([save_arrow] if name == "saved" else []))
    path = folder / name if len(files) == 1 else folder
    if not isinstance(wanted, str):
        assert read(path, **dict(*options)) == wanted
        return
    with pytest.raises(ValueError, match=wanted) as error:
        read(path, **dict(*options))
    assert "\n" not in str(error.value)
    assert not (folder / "to").exists()


@pytest.mark.parametrize("read", [rows, splits, documents, prose, arena])
def test_a_file_that_does_not_exist_is_named(read, tmp_path):
    with pytest.raises(ValueError, match=r"gone\.csv,? (which )?does not exist"):
        read(tmp_path / "gone.csv")
