import numpy as np
import pytest

from nystrom_lab.data.lra.pathfinder.task import Pathfinder
from nystrom_lab.data.store.prepared_folder import new_folder
from nystrom_lab.data.store.split import Pictures, write_pictures
from nystrom_lab.data.store.token_files import SPLITS, gather, write_split

PIXELS = np.random.default_rng(0).integers(0, 256, (5, 3, 3), dtype=np.uint8)
LABELS = np.array([0, 1, 1, 0, 1], dtype=np.uint8)


def parts(*sizes):
    ends = np.cumsum(sizes)
    return [Pictures(PIXELS[end - size : end], LABELS[end - size : end]) for size, end in zip(sizes, ends, strict=True)]


def test_pictures_come_back_for_any_parts_in_which_they_were_written(tmp_path):
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
def test_samples_that_are_not_squares_of_one_size_raise(tmp_path, lengths):
    samples = gather([np.zeros(length, dtype=np.uint8) for length in lengths], [0, 1])
    with new_folder(tmp_path / "data", task="pathfinder", settings={}) as partial:
        for split in SPLITS:
            write_split(partial, split, samples)
    with pytest.raises(ValueError, match=r"val_offsets.npy holds pathfinder samples that are not squares of one size"):
        Pathfinder(tmp_path / "data", "val")
