import csv
import importlib.metadata
import importlib.util
import math
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import astuple, replace
from pathlib import Path

import numpy as np
import pytest

import nystrom
import nystrom_lab
from nystrom.whole_files import check_folder
from nystrom_lab.measure import rows as records
from nystrom_lab.measure.rows import HEADER, Row, append_rows, read_rows, started_as


def a_row(**changes):
    plain = Row(study="s", quantity="forward time", method="softmax", value=1 / 3, unit="ms", device="cpu")
    return replace(plain, **changes)


def test_what_is_written_is_what_is_read(tmp_path):
    rows = [
        a_row(low=0.1, high=1e-300, repeats=7, n=512, m=64, facts={"b": 1, "h": 8}, seed=0),
        a_row(method='a "quoted", name', note="two\nlines; ünïcode"),
        a_row(value=math.inf, note="overflows", n=None, command="nystrom bench efficiency --lengths 512"),
        # numpy's number as text would have the name of its type.
        a_row(value=np.float64(0.25)),
    ]
    append_rows(tmp_path / "rows.csv", rows)
    assert read_rows(tmp_path / "rows.csv") == rows


def test_a_value_that_was_not_measured_stays_nan(tmp_path):
    row = Row(study="s", quantity="q", method="m", value=math.nan, unit="ms", device="cpu", note="too long")
    append_rows(tmp_path / "rows.csv", [row])
    (back,) = read_rows(tmp_path / "rows.csv")
    assert math.isnan(back.value)
    assert astuple(replace(back, value=0.0)) == astuple(replace(row, value=0.0))


def test_facts_are_columns_and_a_new_one_is_added_to_all_rows(tmp_path):
    path = tmp_path / "rows.csv"
    facts = ({"b": 1, "layer": 3}, {}, {"task, first": "a, b", "b": 2}, {"b": 4})
    rows = [a_row(facts=each) for each in facts]
    append_rows(path, rows[:2])
    append_rows(path, rows[2:3])
    append_rows(path, rows[3:])
    first, *lines = csv.reader(path.read_text().splitlines())
    assert first == [*HEADER, "b", "layer", "task, first"]
    assert [line[len(HEADER) :] for line in lines] == [["1", "3", ""], ["", "", ""], ["2", "", "a, b"], ["4", "", ""]]
    assert read_rows(path) == rows
    assert [row.words for row in rows[:2]] == ["b=1 layer=3", ""]


def test_what_is_no_row_is_refused():
    with pytest.raises(ValueError, match="note is empty"):
        a_row(value=math.nan)
    with pytest.raises(ValueError, match="fact 'seed' of a row is a column of its own"):
        a_row(facts={"seed": 3})


@pytest.mark.parametrize("further", [",b,b", ",,b", ",note"])
def test_columns_of_one_name_are_no_header(tmp_path, further):
    path = tmp_path / "rows.csv"
    path.write_text(",".join(HEADER) + further + "\n")
    with pytest.raises(ValueError, match=r"rows\.csv, line 1 .* expected the header"):
        read_rows(path)


@pytest.mark.parametrize("content", ["a,b,c\n1,2,3\n", "", "\x00\xff\n"])
def test_a_foreign_file_raises_by_name(tmp_path, content):
    path = tmp_path / "other.csv"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(ValueError, match=r"other\.csv, line 1 .*expected the header"):
        read_rows(path)
    if content:
        with pytest.raises(ValueError, match=r"other\.csv, line 1"):
            append_rows(path, [a_row()])
        assert path.read_text(encoding="latin-1") == content


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text[:-5], "line 3 has no end"),
        (lambda text: f"{text}1,2,3\n", "line 4 has 3 cells; expected 18"),
        (lambda text: text.replace("0.125", "fast"), "line 2 has value = 'fast'"),
        (lambda text: text.replace("0.125", "1" * 200_000), r"line 2 is not CSV \(field larger than field limit"),
    ],
)
def test_damage_is_named_by_its_line_and_stays(tmp_path, damage, message):
    path = tmp_path / "rows.csv"
    append_rows(path, [a_row(value=0.125), a_row()])
    path.write_text(damaged := damage(path.read_text()))
    with pytest.raises(ValueError, match=rf"rows\.csv, {message}"):
        read_rows(path)
    if "end" in message:
        with pytest.raises(ValueError, match=message):
            append_rows(path, [a_row()])
    assert path.read_text() == damaged


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"none\.csv is not a file"):
        read_rows(tmp_path / "none.csv")


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "taken").touch()
    for place in (tmp_path / "taken", tmp_path / "taken" / "below"):
        with pytest.raises(ValueError, match=r"taken.* cannot be written .*choose another folder"):
            check_folder(place)


def test_the_command_leaves_out_the_machines_folders(monkeypatch):
    words = ["/opt/env/bin/nystrom", "bench", "--to", "/home/me/runs", "--file=/home/me/x.csv", "--name", "two words"]
    monkeypatch.setattr(sys, "argv", words)
    assert started_as() == "nystrom bench --to runs --file=x.csv --name 'two words'"
    assert a_row().command == started_as()
    monkeypatch.setattr(sys, "argv", ["/src/nystrom/__main__.py", "bench"])
    assert started_as() == "nystrom bench"
    monkeypatch.setattr("sys.argv", ["/here/tools/gpu_errors.py", "--to", "/there/errors.csv"])
    assert started_as() == "python tools/gpu_errors.py --to errors.csv"


SOURCES = os.pathsep.join(str(Path(module.__file__).parents[1]) for module in (nystrom, nystrom_lab))
IMPORTED = "import os, sys; sys.path += sys.argv[1].split(os.pathsep); from nystrom_lab.measure import rows"


def test_records_run_on_the_standard_library_alone():
    # -S leaves out site-packages, and so torch.
    command = [sys.executable, "-I", "-S", "-c", IMPORTED, SOURCES]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def copied_records(folder: Path):
    """The module, loaded from a copy in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(records.__file__, folder / "records.py")
    spec = importlib.util.spec_from_file_location("copied_records", folder / "records.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["copied_records"] = module
    spec.loader.exec_module(module)
    return module


# Appends groups of three rows that share a name, and says so after each.
WRITER = f"""
{IMPORTED}
from pathlib import Path
print("ready", flush=True)
sys.stdin.readline()
row = dict(study="s", quantity="q", value=1.0, unit="", device="cpu", note="x" * 3000, command="c")
for count in range(int(sys.argv[4])):
    method = sys.argv[3] + "-" + str(count)
    rows.append_rows(Path(sys.argv[2]), [rows.Row(method=method, n=n, **row) for n in range(3)])
    print(method, flush=True)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="one process at a time appends there")
def test_rows_of_many_processes_are_all_there_and_whole_where_some_are_killed(tmp_path):
    path = tmp_path / "rows.csv"
    command = [sys.executable, "-I", "-S", "-c", WRITER, SOURCES, str(path)]
    names = {f"endless{i}": 10**6 for i in range(4)} | {f"other{i}": 20 for i in range(4)}
    writers = {
        name: subprocess.Popen([*command, name, str(count)], bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for name, count in names.items()
    }
    # All start to write at once.
    assert [each.stdout.readline() for each in writers.values()] == [b"ready\n"] * 8
    for each in writers.values():
        each.stdin.write(b"\n")
    said = []
    for name, each in writers.items():
        if name.startswith("endless"):
            # Killed while it writes its next group, or waits to.
            said.append(each.stdout.readline().decode().strip())
            each.kill()
        said += each.communicate()[0].decode().split()
        assert each.returncode == (0 if name.startswith("other") else -signal.SIGKILL)
    append_rows(path, [a_row(method="after")])
    assert len(said) >= 4 + 4 * 20
    found = [row.method for row in read_rows(path)]
    assert {name: found.count(name) for name in said} == dict.fromkeys(said, 3)
    # A process may have been killed before it could say that its last group was written.
    assert {found.count(name) for name in set(found) - {"after"}} == {3}
    assert len(set(found)) <= len(said) + 4 + 1


def test_a_file_keeps_its_mode_and_its_link(tmp_path):
    append_rows(tmp_path / "rows.csv", [a_row()])
    (tmp_path / "rows.csv").chmod(0o640)
    (tmp_path / "link.csv").symlink_to("rows.csv")
    append_rows(tmp_path / "link.csv", [a_row()])
    assert (tmp_path / "link.csv").is_symlink()
    assert (tmp_path / "rows.csv").stat().st_mode & 0o777 == 0o640
    assert len(read_rows(tmp_path / "rows.csv")) == 2
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["link.csv", "rows.csv"]


def git(folder, *words):
    identity = ["-c", "user.name=n", "-c", "user.email=n@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", "-C", folder, *identity, *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def commit_of(module):
    module._commit.cache_clear()
    return module.Row(study="s", quantity="q", method="m", value=1.0, unit="", device="cpu").commit


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_commit_is_that_of_the_checkout_and_says_what_was_changed(tmp_path):
    module = copied_records(tmp_path / "checkout")
    git(tmp_path / "checkout", "init", "-q")
    assert commit_of(module) == ""
    git(tmp_path / "checkout", "add", ".")
    git(tmp_path / "checkout", "commit", "-q", "-m", "one")
    head = git(tmp_path / "checkout", "rev-parse", "--short", "HEAD")
    assert commit_of(module) == head
    with (tmp_path / "checkout" / "records.py").open("a") as file:
        file.write("\n")
    assert commit_of(module) == head + "+dirty"


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_a_copy_installed_inside_another_checkout_has_no_commit(tmp_path):
    git(tmp_path, "init", "-q")
    (tmp_path / "own.txt").touch()
    git(tmp_path, "add", "own.txt")
    git(tmp_path, "commit", "-q", "-m", "one")
    assert commit_of(copied_records(tmp_path / "site-packages")) == ""


def test_without_git_there_is_no_commit_and_no_error(monkeypatch, tmp_path):
    module = copied_records(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit_of(module) == ""
