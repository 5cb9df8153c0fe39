"""The next process that makes the same file removes what a killed one left, and no error names what is gone."""

import errno
import os

import pytest

from nystrom.temporary import naming, remove_leftovers, scratch_folder, temporary_file, temporary_folder
from nystrom.whole_files import write_whole


def killed(act):
    """Run a function in a process that is killed in it."""
    if not (child := os.fork()):
        try:
            act()
        finally:
            os._exit(1)
    os.waitpid(child, 0)


def in_the_middle(made, path):
    def act():
        with made(path) as partial:
            if partial.is_dir():
                (partial / "inside").mkdir()
                (partial / "inside" / "file").write_text("half")
            os._exit(9)

    return act


@pytest.mark.parametrize(("made", "left"), [(temporary_file, 1), (temporary_folder, 2)])
def test_what_a_killed_process_left_goes_with_the_next_and_nothing_else_does(tmp_path, made, left):
    killed(in_the_middle(made, tmp_path / "a"))
    assert len(os.listdir(tmp_path)) == left
    kept = [".a.0123456.partial", ".a.0123456x.partial", ".b.01234567.partial", ".a.partial", "a.01234567.partial"]
    for name in kept:
        (tmp_path / name).touch()
    (tmp_path / ".a.00000001.partial").symlink_to(tmp_path / ".a.partial")
    (tmp_path / ".a.00000002.partial").mkdir()
    os.mkfifo(tmp_path / ".a.00000003.partial")
    kept += [f".a.0000000{number}.partial" for number in (1, 2, 3)]
    with made(tmp_path / "a") as partial:
        used = sorted([*kept, *(partial.name + end for end in ("", ".lock")[:left])])
        remove_leftovers(tmp_path / "a")
        assert sorted(os.listdir(tmp_path)) == used
        write_whole(tmp_path / "a", "another")
        assert sorted(os.listdir(tmp_path)) == sorted(["a", *used])
    assert sorted(os.listdir(tmp_path)) == sorted(["a", *kept])


def test_a_link_in_the_place_of_a_folder_that_was_left_is_not_followed(tmp_path):
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "file").touch()
    (tmp_path / ".a.01234567.partial").symlink_to(tmp_path / "victim")
    (tmp_path / ".a.01234567.partial.lock").touch()
    with temporary_folder(tmp_path / "a"):
        pass
    assert os.listdir(tmp_path / "victim") == ["file"]


def test_what_was_renamed_stays_and_what_failed_goes(tmp_path):
    with temporary_folder(tmp_path / "a") as partial:
        partial.rename(tmp_path / "a")
    with pytest.raises(ZeroDivisionError), temporary_folder(tmp_path / "a"):
        raise ZeroDivisionError
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("made", [temporary_file, temporary_folder])
def test_an_error_names_what_the_user_named(tmp_path, made):
    with pytest.raises(ValueError, match=f"^{tmp_path}/a/x is damaged$"), made(tmp_path / "a") as partial:
        raise ValueError(f"{partial}/x is damaged")
    with pytest.raises(FileNotFoundError) as caught, made(tmp_path / "a") as partial:
        partial.with_name(f"{partial.name}x").read_bytes()
    assert caught.value.filename == f"{tmp_path}/ax"
    with pytest.raises(OSError, match="No space") as caught, made(tmp_path / "a"):
        raise OSError(errno.ENOSPC, "No space")
    assert str(caught.value) == f"[Errno {errno.ENOSPC}] No space"
    with pytest.raises(KeyError, match="7"), made(tmp_path / "a"):
        raise KeyError(7)


def test_the_inner_name_wins_and_a_full_tmpdir_is_called_so(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def write():
        with scratch_folder() as folder, naming("source", folder / "converted"):
            (folder / "model").mkdir()
            write_whole(folder / "model", "x")

    def read():
        with scratch_folder() as folder, naming("source", folder / "converted"):
            raise ValueError(f"{folder}/converted/model is damaged")

    with pytest.raises(OSError, match=rf"^TMPDIR={tmp_path}/model cannot be written .*: free space, or choose another"):
        write()
    with pytest.raises(ValueError, match=r"^source/model is damaged$"):
        read()
    assert os.listdir(tmp_path) == []


def test_a_scratch_folder_is_for_this_user_alone():
    with scratch_folder() as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
