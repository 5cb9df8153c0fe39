import csv
import errno
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
