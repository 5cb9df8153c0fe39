"""A fresh folder takes the place of nothing."""

import pytest
import torch
from safetensors.torch import save_file

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


def test_who_may_read_a_folder_may_read_its_weights(tmp_path):
    with fresh_folder(tmp_path / "to") as partial:
        (partial / "config.json").touch()
        save_file({"weight": torch.zeros(1)}, partial / "model.safetensors")
    config, weights = ((tmp_path / "to" / name).stat().st_mode for name in ("config.json", "model.safetensors"))
    assert weights == config
