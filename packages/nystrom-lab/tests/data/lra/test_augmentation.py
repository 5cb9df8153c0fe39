"""Varied samples are what their equation says."""

import numpy as np
import pytest
from scipy.ndimage import map_coordinates

from nystrom_lab.data.lra.augmentation import crop_text, crop_texts, mirror_picture, vary_picture


def test_a_crop_is_a_stretch_of_at_least_half():
    tokens, lengths, starts = np.arange(1, 11), set(), set()
    for seed in range(300):
        crop = crop_text(tokens, np.random.default_rng(seed))
        assert (np.diff(crop) == 1).all()
        lengths.add(len(crop))
        starts.add(int(crop[0]))
    assert lengths == {5, 6, 7, 8, 9, 10}
    assert starts == {1, 2, 3, 4, 5, 6}
    assert crop_text(tokens[:1], np.random.default_rng(0)).tolist() == [1]
    pair = crop_texts((tokens, tokens[:3]), np.random.default_rng(0))
    assert [type(part) for part in pair] == [np.ndarray, np.ndarray]


def test_a_picture_is_shifted_scaled_and_mirrored_as_scipy_does():
    picture = np.random.default_rng(0).integers(0, 256, (8, 8), dtype=np.uint8)
    mirrors = set()
    for seed in range(8):
        rng = np.random.default_rng(seed)
        scale = rng.uniform(0.9, 1.1)
        down, right = rng.uniform(-0.8, 0.8, size=2)
        mirror = -1 if rng.random() < 0.5 else 1
        mirrors.add(mirror)
        place = (np.arange(8) - 3.5) / scale
        rows, columns = place - down + 3.5, mirror * place - right + 3.5
        where = np.stack(np.meshgrid(rows, columns, indexing="ij"))
        wanted = map_coordinates(picture.astype(float), where, order=1, mode="nearest")
        varied = vary_picture(picture.reshape(-1), np.random.default_rng(seed))
        assert varied.dtype == np.uint8
        # Half a gray level of rounding.
        assert np.abs(varied.reshape(8, 8) - wanted).max() <= 0.5 + 1e-9
    assert mirrors == {-1, 1}


def test_lines_are_mirrored_alone():
    picture = np.arange(9, dtype=np.uint8)
    seen = {tuple(mirror_picture(picture, np.random.default_rng(seed))) for seed in range(40)}
    square = picture.reshape(3, 3)
    wanted = {tuple(square[::down, ::right].reshape(-1)) for down in (1, -1) for right in (1, -1)}
    assert seen == wanted


@pytest.mark.parametrize("vary", [vary_picture, mirror_picture])
def test_a_varied_picture_becomes_a_tensor_without_a_warning(vary):
    import torch

    picture = np.arange(16, dtype=np.uint8)
    for seed in range(4):
        torch.from_numpy(np.stack([vary(picture, np.random.default_rng(seed))]))
