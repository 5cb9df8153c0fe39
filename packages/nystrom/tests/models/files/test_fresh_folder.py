"""A fresh folder takes the place of nothing."""

import pytest

from nystrom.models.files.folder import fresh_folder


@pytest.mark.parametrize(
    "state",
    [
        lambda to: (to.mkdir(), (to / "thesis.tex").touch()),
        lambda to: to.touch(),
        lambda to: to.symlink_to(to.parent),
        lambda to: to.symlink_to(to.parent / "nowhere"),
    ],
)
def test_what_came_while_a_folder_was_filled_is_named_and_stays(tmp_path, state):
    def fill():
        with fresh_folder(tmp_path / "to") as partial:
            (partial / "config.json").touch()
            state(tmp_path / "to")

    with pytest.raises(ValueError, match=r"to is (not empty|a file|a symbolic link)"):
        fill()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["to"]
    assert not (tmp_path / "to" / "config.json").exists()
