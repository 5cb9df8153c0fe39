import pytest

from nystrom_lab.training.grid.scheduler import open_log


def test_a_log_grows_and_is_not_written_through_a_link(tmp_path):
    for line in ("a\n", "b\n"):
        with open_log(tmp_path / "log") as log:
            log.write(line.encode())
    assert (tmp_path / "log").read_text() == "a\nb\n"
    for target in ("log", "nowhere"):
        (tmp_path / f"to-{target}").symlink_to(tmp_path / target)
        with pytest.raises(ValueError, match=f"to-{target} is a symbolic link, which is not written through"):
            open_log(tmp_path / f"to-{target}")
    assert (tmp_path / "log").read_text() == "a\nb\n"
    assert not (tmp_path / "nowhere").exists()
