"""Files are whole or not there, and nothing is written through a link."""

import errno
import os
from pathlib import Path

import pytest

from nystrom.whole_files import (
    NotWritten,
    check_fresh,
    check_new,
    check_place,
    whole_bytes,
    whole_file,
    write_whole,
)


def test_text_and_bytes_are_written_as_they_are(tmp_path):
    write_whole(tmp_path / "text", "ö\r\n")
    write_whole(tmp_path / "bytes", b"\0\r\n")
    assert (tmp_path / "text").read_bytes() == "ö\r\n".encode()
    assert (tmp_path / "bytes").read_bytes() == b"\0\r\n"
    assert sorted(os.listdir(tmp_path)) == ["bytes", "text"]


def test_a_failure_leaves_the_file_that_was_there_and_nothing_else(tmp_path):
    (tmp_path / "a").write_text("before")

    def fail():
        with whole_bytes(tmp_path / "a") as file:
            file.write(b"half")
            file.flush()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert (tmp_path / "a").read_text() == "before"
    assert os.listdir(tmp_path) == ["a"]


def test_a_file_keeps_its_permissions_and_a_new_one_has_those_of_the_process(tmp_path):
    (tmp_path / "a").touch(mode=0o600)
    (tmp_path / "usual").touch()
    for name in ("a", "b"):
        write_whole(tmp_path / name, "new")
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "b").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_neither_a_link_beside_the_file_nor_one_in_its_place_is_written_through(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    for name in ("a", ".a.partial", "a.partial"):
        (tmp_path / name).symlink_to(victim)
    write_whole(tmp_path / "a", "new")
    assert victim.read_text() == "mine"
    assert (tmp_path / "a").read_text() == "new"
    assert not (tmp_path / "a").is_symlink()


def test_the_name_that_a_file_has_while_it_is_written_differs_each_time_and_is_made_anew(tmp_path, monkeypatch):
    names = iter(["00000000", "11111111"])
    monkeypatch.setattr("nystrom.temporary.secrets.token_hex", lambda size: next(names))
    (tmp_path / ".a.00000000.partial").symlink_to(tmp_path / "victim")
    with whole_file(tmp_path / "a") as partial:
        assert partial.name == ".a.11111111.partial"
    assert not (tmp_path / "victim").exists()


@pytest.mark.parametrize("kind", ["file", "link", "broken link", "folder"])
def test_what_has_the_name_of_a_new_file_is_not_written_over(tmp_path, kind):
    path = tmp_path / "a"
    (tmp_path / "other").touch()
    {
        "file": path.touch,
        "link": lambda: path.symlink_to(tmp_path / "other"),
        "broken link": lambda: path.symlink_to(tmp_path / "none"),
        "folder": path.mkdir,
    }[kind]()
    for attempt in (lambda: check_new(path), lambda: write_whole(path, "new", new=True)):
        with pytest.raises(ValueError, match=r"a already exists and is not overwritten: choose another name"):
            attempt()
    assert sorted(os.listdir(tmp_path)) == ["a", "other"]


@pytest.mark.parametrize("links", [True, False])
def test_a_file_that_comes_while_a_new_one_is_written_is_not_written_over(tmp_path, monkeypatch, links):
    def none(*names):
        raise PermissionError(errno.EPERM, "no hard links here")

    if not links:
        monkeypatch.setattr(os, "link", none)
    write_whole(tmp_path / "b", "new", new=True)
    assert (tmp_path / "b").read_text() == "new"
    with pytest.raises(ValueError, match="already exists"), whole_file(tmp_path / "a", new=True):
        (tmp_path / "a").write_text("mine")
    assert (tmp_path / "a").read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)),
        # The error of safetensors and torch.
        RuntimeError("I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_is_told_of_the_file_that_was_wanted(tmp_path, error):
    (tmp_path / "a").write_text("before")
    with pytest.raises(NotWritten) as found, whole_file(tmp_path / "a"):
        raise error
    assert found.value.errno in (errno.ENOSPC, errno.EDQUOT)
    assert str(found.value) == (
        f"{tmp_path / 'a'} cannot be written ({found.value.strerror}): free space, or choose another place; "
        "nothing was overwritten."
    )
    assert (tmp_path / "a").read_text() == "before"


def test_a_file_that_cannot_be_made_is_told_of_too_and_other_errors_pass(tmp_path):
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "none" / "a", tmp_path / "folder"):
        with pytest.raises(NotWritten, match=f"{path.name} cannot be written"):
            write_whole(path, "x")
    with pytest.raises(FileNotFoundError, match="elsewhere"), whole_file(tmp_path / "a"):
        (tmp_path / "elsewhere").read_bytes()
    with pytest.raises(NotWritten, match="inner"), whole_file(tmp_path / "outer"), whole_file(tmp_path / "inner"):
        raise OSError(errno.ENOSPC, "full")


def test_a_place_that_nothing_can_be_written_to_is_refused_before_work_and_nothing_is_made(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    (tmp_path / "here" / "inside").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here" / "inside")
    cases = {
        tmp_path / "file" / "new": "cannot be written",
        tmp_path / ("long" * 64): "cannot be written",
        Path("."): "current folder or one around it",
        Path(".."): "current folder or one around it",
        tmp_path / "here": "current folder or one around it",
        tmp_path / "none" / "..": "current folder or one around it",
        Path("/"): "is a mount point",
    }
    for place, says in cases.items():
        with pytest.raises(ValueError, match=rf"^{place} .*{says}.*: (choose|name) a"):
            check_place(place)
    for place in (tmp_path / "none" / "deep" / "new", Path("new"), tmp_path / "here" / "inside" / "new"):
        check_place(place)
        check_new(place)
        check_fresh(place)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "here", "inside"]
