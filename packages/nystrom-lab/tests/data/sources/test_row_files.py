import bz2
import csv
import errno
import gzip
import io
import json
import lzma
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nystrom_lab.data.sources.row_files import is_row_file, read_fields

WANTED = {"label_field": ("label", "Target"), "text_field": ("text", "Source")}
ROWS = [(b"1", "gr\u00fcn, \u201eja\u201c".encode()), (b"0", b'say "no"')]
CSV = 'id,label,text\r\n7,1,"gr\u00fcn, \u201eja\u201c"\r\n8,0,"say ""no"""\r\n'.encode()
TSV = 'label\ttext\n1\tgr\u00fcn, \u201eja\u201c\n0\tsay "no"\n'.encode()
JSONL = '{"text": "gr\\u00fcn, \u201eja\u201c", "label": 1}\n\n{"label": 0.0, "text": "say \\"no\\""}\n'.encode()


def read(path, wanted=WANTED, **options):
    return list(read_fields(path, wanted, **options))


def write(path, content):
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("name", "content", "lines"), [("a.csv", CSV, [2, 3]), ("a.tsv", TSV, [2, 3]), ("a.jsonl", JSONL, [1, 3])]
)
@pytest.mark.parametrize(
    ("ending", "pack"), [("", bytes), (".gz", gzip.compress), (".xz", lzma.compress), (".bz2", bz2.compress)]
)
def test_every_format_gives_the_same_rows_plain_or_compressed(tmp_path, name, content, lines, ending, pack):
    path = write(tmp_path / (name + ending), pack(content))
    assert read(path, progress=True) == [(line, list(row)) for line, row in zip(lines, ROWS, strict=True)]
    assert is_row_file(path)


def test_files_of_other_names_are_not_files_of_rows(tmp_path):
    for name in ("a.txt", "a.csv.zip", "csv", "a.gz"):
        assert not is_row_file(tmp_path / name)
    with pytest.raises(ValueError, match=r"a.txt has an unsupported format: its name must end in .csv"):
        read(write(tmp_path / "a.txt", CSV))


def test_a_last_line_without_an_end_and_blank_lines_are_read(tmp_path):
    assert [line for line, _ in read(write(tmp_path / "a.csv", CSV.removesuffix(b"\r\n")))] == [2, 3]
    assert [line for line, _ in read(write(tmp_path / "a.tsv", TSV.replace(b"\n", b"\r\n\r\n")))] == [3, 5]


def test_a_carriage_return_of_a_text_stays_in_it(tmp_path):
    path = write(tmp_path / "a.tsv", b"label\ttext\r\n1\ta\r\r\n")
    assert read(path) == [(2, [b"1", b"a\r"])]


def test_errors_of_the_disk_are_not_explained_away(tmp_path):
    # Reads of the first page of memory fail as those of a broken disk do.
    broken = Path("/proc/self/mem")
    if not broken.exists():
        pytest.skip("every file here can be read")
    (tmp_path / "a.tsv").symlink_to(broken)
    with pytest.raises(OSError, match="Input/output error") as caught:
        read(tmp_path / "a.tsv")
    assert caught.value.errno == errno.EIO


def test_rows_of_several_lines_have_the_number_of_their_first(tmp_path):
    path = write(tmp_path / "a.csv", b'label,text\n1,"a\nb"\n0,"c\r\n\r\nd"\n1,e\n')
    assert [(line, text) for line, (_, text) in read(path)] == [(2, b"a\nb"), (4, b"c\r\n\r\nd"), (7, b"e")]


def test_a_field_may_be_longer_than_the_csv_modules_own_limit(tmp_path):
    before = csv.field_size_limit()
    text = b"x" * (before + 1)
    assert read(write(tmp_path / "a.csv", b"label,text\n1," + text + b"\n"))[0][1][1] == text
    assert csv.field_size_limit() == before


def test_a_byte_order_mark_is_dropped(tmp_path):
    for name, content in (("a.csv", CSV), ("a.tsv", TSV), ("a.jsonl", JSONL)):
        assert len(read(write(tmp_path / name, b"\xef\xbb\xbf" + content))) == 2


@pytest.mark.parametrize("mark", [b"\xff\xfe", b"\xfe\xff"])
def test_utf_16_is_named(tmp_path, mark):
    with pytest.raises(ValueError, match=r"a.csv is UTF-16: save it as UTF-8"):
        read(write(tmp_path / "a.csv", mark + "label,text".encode("utf-16-le")))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.binary(min_size=1), min_size=1, max_size=5))
def test_csv_gives_back_any_bytes(tmp_path_factory, texts):
    out = io.StringIO(newline="")
    writer = csv.writer(out)
    writer.writerow(["label", "text"])
    writer.writerows([["0", text.decode("utf-8", errors="surrogateescape")] for text in texts])
    content = out.getvalue().encode("utf-8", errors="surrogateescape")
    path = write(tmp_path_factory.mktemp("csv") / "a.csv", content)
    assert [text for _, (_, text) in read(path)] == texts


@settings(deadline=None, max_examples=60)
@given(st.lists(st.binary(min_size=1).filter(lambda text: not {*text} & {*b"\t\n"}), min_size=1, max_size=5))
def test_tsv_gives_back_any_bytes_but_tabs_and_line_ends(tmp_path_factory, texts):
    content = b"text\tlabel\n" + b"".join(text + b"\t0\n" for text in texts)
    path = write(tmp_path_factory.mktemp("tsv") / "a.tsv", content)
    assert [text for _, (_, text) in read(path)] == texts


@settings(deadline=None, max_examples=60)
@given(st.lists(st.text(), min_size=1, max_size=5))
def test_json_lines_give_back_any_text(tmp_path_factory, texts):
    content = "".join(json.dumps({"text": text, "label": 0}, ensure_ascii=False) + "\n" for text in texts).encode()
    path = write(tmp_path_factory.mktemp("jsonl") / "a.jsonl", content)
    assert [text.decode() for _, (_, text) in read(path)] == texts


def test_values_of_json_are_written_plainly(tmp_path):
    values = ["a", 1, -2, 1.0, 0.5, True, False]
    path = write(tmp_path / "a.jsonl", "".join(json.dumps({"text": "t", "label": v}) + "\n" for v in values).encode())
    assert [label for _, (label, _) in read(path)] == [b"a", b"1", b"-2", b"1", b"0.5", b"true", b"false"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"", "a.csv is empty: it must begin with a header line"),
        ("a.tsv", b"\n\n", "a.tsv is empty"),
        ("a.csv", b"label,text\n1\n", r"a.csv, line 2: 1 fields where 2 are wanted \(label, text\), beginning '1'"),
        ("a.csv", b"label,text\n1,a\n0,b,c\n", "a.csv, line 3: 3 fields where 2"),
        (
            "a.csv",
            b'label,text\n1,a\n0,"b\nc\n',
            r"a.csv, line 3: the row is not CSV .*quote is missing, or .* cut short",
        ),
        ("a.csv", b'label,text\n1,a\n0,"b"c\n', "a.csv, line 3: the row is not CSV"),
        ("a.csv", b"label,text,label\n", "a.csv, line 1: the header names label twice"),
        ("a.tsv", b"label\ttext\n1\ta\n0 b\n", "a.tsv, line 3: 1 fields where 2 are wanted"),
        ("a.tsv", b"label\ttext\n1\ta\tb\n", "a.tsv, line 2: 3 fields where 2 are wanted"),
        ("a.csv", b"label;text\n1;a\n", "line 1: the first line must name the columns, and there is no 'label' or"),
        ("a.csv", b"label,words\n", r"no 'text' or 'Source' among the fields 'label', 'words': name .* --text-field"),
        (
            "a.csv",
            b"label,text,Source\n",
            "there is both 'text' and 'Source' among .*: name the right one with --text-field",
        ),
        ("a.jsonl", b'{"text": "a", "label": 1}\n{"text": "b", "la', "a.jsonl, line 2: not JSON .* cut short"),
        ("a.jsonl", b'{"text": "a", "label": 1}\n{"text": "b"}\n', "line 2: the field 'label' is missing"),
        ("a.jsonl", b"\n[1, 2]\n", r"line 2: b'\[1, 2\]\\n' is not a JSON object"),
        ("a.jsonl", b'{"text": null, "label": 1}\n', "line 1: text is None; expected a text or a number"),
        ("a.jsonl", b'{"text": ["a"], "label": 1}\n', r"line 1: text is \['a'\]; expected a text"),
        ("a.jsonl", b'{"text": "a", "label": NaN}\n', "line 1: label is nan"),
        ("a.jsonl", b'{"text": "\\ud83d", "label": 1}\n', "line 1: text holds half a character"),
        ("a.jsonl", b'{"text": "\xff", "label": 1}\n', "line 1: not JSON .*invalid start byte"),
        ("a.jsonl", b"[" * 100_000, "line 1: not JSON"),
    ],
)
def test_a_broken_row_is_named_with_its_line(tmp_path, name, content, message):
    path = write(tmp_path / name, content)
    with pytest.raises(ValueError, match=message) as caught:
        read(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(("ending", "pack"), [(".gz", gzip.compress), (".xz", lzma.compress), (".bz2", bz2.compress)])
def test_a_compressed_file_that_is_cut_short_is_named(tmp_path, ending, pack):
    # Random digits do not compress to less than the part that is cut.
    content = b"label\ttext\n" + b"".join(b"%d\t%d\n" % (i % 2, i**9) for i in range(5000))
    packed = pack(content)
    for kept in (packed[:-1], packed[: len(packed) // 2], packed[:20], b"nothing of that kind at all"):
        with pytest.raises(ValueError, match=r"a.tsv\S* cannot be unpacked after line \d+ .*: it is cut short or dam"):
            read(write(tmp_path / f"a.tsv{ending}", kept))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"a.csv does not exist or is not a file"):
        read(tmp_path / "a.csv")


def test_a_field_cannot_be_taken_twice(tmp_path):
    wanted = {"first_field": ("text",), "second_field": ("text",)}
    with pytest.raises(ValueError, match=r"--first-field, --second-field name one field twice \(text, text\)"):
        read(write(tmp_path / "a.csv", CSV), wanted)


def test_columns_may_be_named_by_the_reader(tmp_path):
    path = write(tmp_path / "a.tsv", b"1\tx\tfirst\n0\ty\tsecond\n")
    assert read(path, columns=("label", "id", "text")) == [(1, [b"1", b"first"]), (2, [b"0", b"second"])]
