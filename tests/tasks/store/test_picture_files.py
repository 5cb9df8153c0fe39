from pathlib import Path

import numpy as np
import pytest

from nystrom.tasks.lra.pathfinder.task import Pathfinder
from nystrom.tasks.store.picture_files import Pictures, write_pictures
from nystrom.tasks.store.token_files import SPLITS, gather, new_folder, write_split

PIXELS = np.random.default_rng(0).integers(0, 256, (5, 3, 3), dtype=np.uint8)
LABELS = np.array([0, 1, 1, 0, 1], dtype=np.uint8)


def parts(*sizes):
    ends = np.cumsum(sizes)
    return [Pictures(PIXELS[end - size : end], LABELS[end - size : end]) for size, end in zip(sizes, ends, strict=True)]


def test_pictures_come_back_whatever_parts_they_were_written_in(tmp_path):
    with new_folder(tmp_path / "data", task="pathfinder", settings={}) as partial:
        write_pictures(partial, "train", parts(2, 0, 3), count=5, side=3)
        write_pictures(partial, "val", parts(5), count=5, side=3)
        write_pictures(partial, "test", [], count=0, side=3)
    for split in ("train", "val"):
        data = Pathfinder(tmp_path / "data", split)
        assert np.array_equal([data.picture(i) for i in range(5)], PIXELS)
        assert data.labels.tolist() == LABELS.tolist()
        data.verify()
    nothing = Pathfinder(tmp_path / "data", "test")
    assert (len(nothing), nothing.lengths.size, nothing.majority_share) == (0, 0, 0)


@pytest.mark.parametrize("lengths", [(9, 4), (8, 8)])
def test_samples_that_are_no_squares_of_one_size_are_refused(tmp_path, lengths):
    samples = gather([np.zeros(length, dtype=np.uint8) for length in lengths], [0, 1])
    with new_folder(tmp_path / "data", task="pathfinder", settings={}) as partial:
        for split in SPLITS:
            write_split(partial, split, samples)
    with pytest.raises(ValueError, match="pathfinder samples in val that are no squares of one size: delete it"):
        Pathfinder(tmp_path / "data", "val")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_a_full_disk_is_an_error_that_says_how_much_is_needed(tmp_path):
    (tmp_path / "train_tokens.npy").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"train_tokens.npy needs 45 bytes and could not be written \(.*No space left"):
        write_pictures(tmp_path, "train", parts(5), count=5, side=3)
