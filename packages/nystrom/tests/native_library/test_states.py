"""Whatever state file and folder are in, numbers are right, and nothing damaged or foreign is loaded."""

import errno
import os
import stat
import tempfile
from pathlib import Path

import pytest

from nystrom import native, native_library, whole_files


def hold(change):
    """A state of the file: what it holds is changed."""
    return lambda file: file.write_bytes(change(file.read_bytes(), file.stem.removeprefix("native-")))


def flipped(content, at):
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


def whole(content, key):
    return content + native_library._checksum(key, content)


def belong_to_another(path):
    if os.geteuid():
        pytest.skip("only root can give files away")
    os.chown(path, 65534, -1)


def be_a_link(path):
    path.symlink_to(path.rename(path.with_name("elsewhere")))


def be_a_pipe(path):
    path.unlink()
    os.mkfifo(path)


# The states of the file after which it is compiled again, into the folder.
DAMAGED = {
    "absent": Path.unlink,
    "cut": hold(lambda content, _: content[: len(content) // 2]),
    "cut to its checksum": hold(lambda content, _: content[-32:]),
    "flipped": hold(lambda content, _: flipped(content, len(content) // 2)),
    "flipped in the checksum": hold(lambda content, _: flipped(content, len(content) - 1)),
    "empty": hold(lambda *_: b""),
    # The machine in the header of ELF
    "of another machine": hold(lambda content, _: flipped(content, 18)),
    "of another key": hold(lambda content, key: whole(content[:-32], "another " + key)),
    "no library, though whole": hold(lambda _, key: whole(b"none", key)),
    "another user's": belong_to_another,
    "writable by a group": lambda file: file.chmod(0o660),
    "writable by others": lambda file: file.chmod(0o602),
    "a link": be_a_link,
    "a pipe": be_a_pipe,
}
WAYS = ["first call", "forked child", "-W error"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("state", ["whole", *DAMAGED])
def test_a_file_is_loaded_if_it_is_whole_and_ours_and_made_anew_otherwise(state, way, machine, loaded):
    file = machine.make()
    if state != "whole":
        DAMAGED[state](file)

    def check():
        # Warnings are errors in the tests.
        machine.check_numbers()
        machine.check_numbers()
        assert native.status() == (True, file, "")
        assert loaded[-1][:-32] == machine.library
        assert {content[:-32] for content in loaded} <= {machine.library, b"none"}

    machine.run(way, check)
    assert machine.times_compiled() == (1 if state == "whole" else 2)
    assert stat.S_IMODE(file.lstat().st_mode) == 0o600
    assert stat.S_ISREG(file.lstat().st_mode)
    assert file.read_bytes()[:-32] == machine.library


def be_full(code):
    def state(folder, monkeypatch):
        sync = whole_files.sync

        def without_room(path):
            if folder in (path.resolve(), path.resolve().parent):
                raise OSError(code, os.strerror(code))
            sync(path)

        monkeypatch.setattr(whole_files, "sync", without_room)

    return state


def be_another(_, monkeypatch):
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)


def be_a_file(folder, _):
    folder.rename(folder.with_name("elsewhere"))
    folder.touch()


# The states of the folder after which each process compiles for itself.
FOLDERS = {
    "another user's": be_another,
    "writable by a group": lambda folder, _: folder.chmod(0o770),
    "writable by others": lambda folder, _: folder.chmod(0o777),
    "a link": lambda folder, _: be_a_link(folder),
    "a file": be_a_file,
    "read-only": be_full(errno.EROFS),
    "full": be_full(errno.ENOSPC),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("state", FOLDERS)
def test_without_a_folder_of_its_own_a_process_compiles_for_itself_and_warns_once(
    state, way, machine, loaded, monkeypatch, tmp_path
):
    machine.make().unlink()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    (tmp_path / "temporary").mkdir()
    FOLDERS[state](machine.cache, monkeypatch)

    def check():
        if way == "-W error":
            with pytest.raises(RuntimeWarning, match="cannot keep the loops"):
                machine.check_numbers()
        else:
            (problem,) = machine.problems()
            assert str(machine.cache) in problem
            assert "XDG_CACHE_HOME" in problem
        machine.check_numbers()
        runs, file, reason = native.status()
        assert (runs, file) == (True, None)
        assert "cannot keep the loops" in reason
        assert [content[:-32] for content in loaded] == [machine.library]

    machine.run(way, check)
    assert machine.times_compiled() == 2
    assert list((tmp_path / "temporary").iterdir()) == []
