"""Each JSON that is read is an object of its kind, or ends in one line that names the file and what to do."""

import ast
import errno
import os
from pathlib import Path

import pytest

from nystrom.json_files import DEEPEST, parse_json, read_json, read_json_array

REFUSED = {
    "cut short": (b'{"a": ', "is not valid JSON (Expecting value"),
    "empty": (b"", "is not valid JSON (Expecting value"),
    "not UTF-8": (b'{"a": "\xff"}', "is not UTF-8 (invalid start byte at byte 7)"),
    "UTF-16": ('{"a": 1}'.encode("utf-16"), "is not UTF-8"),
    "a list": (b"[]", "holds a list; expected a JSON object"),
    "a number": (b"1", "holds a int; expected a JSON object"),
    "null": (b"null", "holds a NoneType; expected a JSON object"),
    "a number of many digits": (b'{"a": ' + b"1" * 10_000 + b"}", "is not valid JSON (Exceeds the limit"),
    "a name twice": (b'{"a": 1, "b": {"c": 1, "c": 2}}', "is not valid JSON (it has 'c' twice)"),
    "lists in lists": (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", f"is nested more than {DEEPEST} deep"),
    "objects in objects": (b'{"a": ' * 500 + b"1" + b"}" * 500, f"is nested more than {DEEPEST} deep"),
    "one too deep": (b"[" * DEEPEST + b"{}" + b"]" * DEEPEST, "holds a list"),
}


@pytest.mark.parametrize(("content", "says"), REFUSED.values(), ids=REFUSED)
def test_a_file_that_holds_no_object_is_named_in_one_line(content, says, tmp_path):
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"^[^\n]*$") as refused:
        read_json(file, remedy="make it again")
    line = str(refused.value)
    assert line.startswith(f"{file} {says}")
    assert line.endswith(": make it again.")


def test_an_object_as_deep_as_is_allowed_is_read_and_one_deeper_is_not():
    def nested(depth):
        return b'{"a": ' * depth + b"1" + b"}" * depth

    assert parse_json(nested(DEEPEST))
    with pytest.raises(ValueError, match="nested more than"):
        parse_json(nested(DEEPEST + 1))
    # Many brackets that do not stand in each other are not deep.
    assert parse_json(b'{"a": [' + b"[1]," * 1000 + b"[]]}") == {"a": [[1]] * 1000 + [[]]}


def test_an_array_is_read_where_one_is_wanted(tmp_path):
    file = tmp_path / "modules.json"
    file.write_text('[{"path": ""}]')
    assert read_json_array(file) == [{"path": ""}]
    file.write_text("{}")
    with pytest.raises(ValueError, match=r"modules.json holds a dict; expected a JSON array: name a folder"):
        read_json_array(file)


def test_what_is_no_file_is_named_and_never_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "folder.json").mkdir()
    for name, says in (("gone.json", "is missing"), ("pipe.json", "is not a file"), ("folder.json", "is not a file")):
        with pytest.raises(ValueError, match=rf"^\S+{name} {says}: name a folder in Hugging Face format[^\n]*\.$"):
            read_json(tmp_path / name)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
def test_a_file_that_may_not_be_read_is_not_told_as_damaged(number, tmp_path, monkeypatch):
    file = tmp_path / "config.json"
    file.write_text("{}")

    def fail(self):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("pathlib.Path.read_bytes", fail)
    with pytest.raises(OSError, match=os.strerror(number)) as failed:
        read_json(file)
    assert (failed.value.errno, failed.value.filename) == (number, str(file))


def test_no_file_is_read_as_json_by_other_means():
    # Their text is this program's own: its arguments, and a copy of its settings.
    own = {"config.py", "search.py", "child.py", "runs.py"}
    files = [path for path in (Path(__file__).parents[2]).glob("*/src/**/*.py") if path.name not in own]
    assert len(files) > 300, "the packages were not found"
    readers = [
        path.name
        for path in files
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("json.loads", "json.load")
    ]
    assert readers == ["json_files.py"]
