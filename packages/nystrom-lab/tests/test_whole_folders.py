"""A folder has its name when it is whole, and nothing that was there before is lost."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nystrom_lab.whole_folders import whole_folder


def write(to, content):
    with whole_folder(to) as partial:
        (partial / "file").write_text(content)
        (partial / "inside").mkdir()


def found(folder):
    """All files and links below a folder, except records and locks."""
    paths = (path for path in folder.rglob("*") if path.is_symlink() or path.is_file())
    return {
        path.relative_to(folder).as_posix(): os.readlink(path) if path.is_symlink() else path.read_text()
        for path in paths
        if path.name != "complete.json" and path.suffix != ".lock"
    }


def test_what_holds_the_same_files_stays_with_all_that_was_added(tmp_path):
    write(tmp_path / "best", "new")
    (tmp_path / "best" / "README.md").write_text("mine")
    before = (tmp_path / "best").stat().st_ino
    write(tmp_path / "best", "new")
    assert (tmp_path / "best").stat().st_ino == before
    assert found(tmp_path) == {"best/file": "new", "best/README.md": "mine"}


@pytest.mark.parametrize(
    ("state", "kept"),
    [
        (lambda to: None, {}),
        (lambda to: to.write_text("mine"), {"best-before": "mine"}),
        (lambda to: (to.mkdir(), (to / "thesis.tex").write_text("mine")), {"best-before/thesis.tex": "mine"}),
        (lambda to: write(to, "old"), {"best-before/file": "old"}),
        (lambda to: (write(to, "new"), (to / "file").write_text("NEW")), {"best-before/file": "NEW"}),
        (lambda to: to.symlink_to("elsewhere"), {"best-before": "elsewhere"}),
        (lambda to: to.symlink_to("nowhere"), {"best-before": "nowhere"}),
        (
            lambda to: (to.mkdir(), (to.parent / "best-before").write_text("old"), (to / "a").write_text("mine")),
            {"best-before": "old", "best-before-2/a": "mine"},
        ),
    ],
)
def test_what_else_has_the_name_is_kept_under_another(tmp_path, capsys, state, kept):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").write_text("mine")
    state(tmp_path / "best")
    write(tmp_path / "best", "new")
    assert found(tmp_path) == {"elsewhere/file": "mine", "best/file": "new", **kept}
    assert not (tmp_path / "best").is_symlink()
    assert bool(kept) == ("is kept as" in capsys.readouterr().err)


def test_a_failure_leaves_the_folder_that_was_there_and_nothing_else(tmp_path):
    write(tmp_path / "best", "old")
    with pytest.raises(ZeroDivisionError), whole_folder(tmp_path / "best"):
        raise ZeroDivisionError
    assert found(tmp_path) == {"best/file": "old"}
    assert os.listdir(tmp_path) == ["best"]


def test_what_was_there_comes_back_where_the_new_one_cannot_be_renamed(tmp_path, monkeypatch):
    write(tmp_path / "best", "old")
    inner = Path.rename

    def rename(self, to):
        if self.name.endswith(".partial"):
            raise OSError(16, "Device or resource busy")
        return inner(self, to)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(OSError, match="busy"):
        write(tmp_path / "best", "new")
    assert found(tmp_path) == {"best/file": "old"}


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_a_process_that_is_killed_at_any_rename_loses_neither_the_old_nor_the_name(tmp_path, renames):
    write(tmp_path / "best", "old")
    script = f"""
import os
from pathlib import Path
from nystrom_lab.whole_folders import whole_folder
inner, done = Path.rename, []
def rename(self, to):
    if len(done) == {renames}:
        os._exit(9)
    done.append(inner(self, to))
Path.rename = rename
with whole_folder(Path({str(tmp_path / "best")!r})) as partial:
    (partial / "file").write_text("new")
os._exit(9)
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 9
    assert "old" in found(tmp_path).values()
    write(tmp_path / "best", "new")
    assert (tmp_path / "best" / "file").read_text() == "new"
    assert (tmp_path / "best-before" / "file").read_text() == "old"
    assert not list(tmp_path.glob(".best.*"))


def test_links_in_the_place_of_a_partial_folder_are_not_written_through(tmp_path):
    (tmp_path / "victim").mkdir()
    for name in (".best.partial", "best.partial", ".best.01234567.partial"):
        (tmp_path / name).symlink_to(tmp_path / "victim")
    (tmp_path / ".best.01234567.partial.lock").touch()
    write(tmp_path / "best", "new")
    assert list((tmp_path / "victim").iterdir()) == []


def test_who_may_read_a_folder_may_read_its_weights(tmp_path):
    with whole_folder(tmp_path / "best") as partial:
        (partial / "config.json").touch()
        save_file({"weight": torch.zeros(1)}, partial / "model.safetensors")
    config, weights = ((tmp_path / "best" / name).stat().st_mode for name in ("config.json", "model.safetensors"))
    assert weights == config
