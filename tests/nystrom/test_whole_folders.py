"""A folder takes its place when it is whole; see also `tests/tasks/store/test_prepared_folder.py`."""

import os

import pytest

from nystrom.whole_folders import whole_folder


def test_a_folder_takes_the_place_of_the_one_before_with_all_that_is_in_it(tmp_path):
    for number in range(2):
        with whole_folder(tmp_path / "best") as partial:
            (partial / f"file{number}").write_text("x")
            (partial / "inside").mkdir()
    assert sorted(os.listdir(tmp_path / "best")) == ["file1", "inside"]
    assert os.listdir(tmp_path) == ["best"]


def test_a_failure_leaves_the_folder_that_was_there_and_nothing_else(tmp_path):
    (tmp_path / "best").mkdir()
    (tmp_path / "best" / "file").touch()
    with pytest.raises(ZeroDivisionError), whole_folder(tmp_path / "best"):
        raise ZeroDivisionError
    assert os.listdir(tmp_path) == ["best"]
    assert os.listdir(tmp_path / "best") == ["file"]


def test_links_to_another_folder_are_not_written_through(tmp_path):
    (tmp_path / "victim").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "victim" / "file").write_text("mine")
    for name in (".best.partial", "best.partial", "best"):
        (tmp_path / "run" / name).symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="symbolic link"), whole_folder(tmp_path / "run" / "best") as partial:
        (partial / "file").write_text("new")
    assert (tmp_path / "victim" / "file").read_text() == "mine"
