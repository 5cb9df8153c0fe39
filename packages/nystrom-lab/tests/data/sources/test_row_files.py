import csv
import errno
import gzip
import io
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nystrom_lab.data.sources.row_files import read_fields

WANTED = {"label_field": ("label", "Target"), "text_field": ("text", "Source")}


def read(path, wanted=WANTED, **options):
    return list(read_fields(path, wanted, **options))


def write(path, content):
    path.write_bytes(content)
    return path


def test_errors_of_the_disk_are_not_explained_away(tmp_path):
    # Reads of the first page of memory fail as those of a broken disk do.
    broken = Path("/proc/self/mem")
    if not broken.exists():
        pytest.skip("every file here can be read")
    (tmp_path / "a.tsv").symlink_to(broken)
    with pytest.raises(OSError, match="Input/output error") as caught:
        read(tmp_path / "a.tsv")
    assert caught.value.errno == errno.EIO


def test_a_field_may_be_longer_than_the_csv_modules_own_limit(tmp_path):
    before = csv.field_size_limit()
    text = b"x" * (before + 1)
    assert read(write(tmp_path / "a.csv", b"label,text\n1," + text + b"\n"))[0][1][1] == text
    assert csv.field_size_limit() == before


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("a.csv", b"1,%b\n"),
        ("a.csv", b'1,"%b'),
        ("a.csv", b'"\n\n\n\n\n","%b"\n'),
        ("a.tsv", b"1\t%b\n"),
        ("a.jsonl", b'{"label": 1, "text": "%b"}\n'),
    ],
)
def test_a_row_has_a_limit_which_is_told_by_its_line(tmp_path, monkeypatch, name, row):
    monkeypatch.setattr("nystrom_lab.data.sources.unpacking.LONGEST", 100)
    monkeypatch.setattr("nystrom_lab.data.sources.row_files.LONGEST", 100)
    header = {"a.csv": b"label,text\n", "a.tsv": b"label\ttext\n", "a.jsonl": b""}[name]
    fits = header + row % (b"x" * (100 - len(row % b"")))
    path = tmp_path / f"{name}.gz"
    if row.endswith(b"\n"):
        path.write_bytes(gzip.compress(fits))
        assert len(read(path)) == 1
    path.write_bytes(gzip.compress(header + 2 * (row % (b"x" * 101))))
    line = 1 + bool(header)
    with pytest.raises(ValueError, match=rf"{name}.gz, line {line}: the row has more than 0.0001 MB: cut its text"):
        read(path)


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
