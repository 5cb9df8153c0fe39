"""Image of the Long Range Arena: CIFAR-10 in grayscale, pixel by pixel.

A sample is 32 x 32 pixels, row after row; a token is a gray level, 0 to 255, black included; a class is one of ten.
`cifar_files` describes the formats and the conversion to gray. Splits have 45,000 / 5,000 / 10,000 pictures: the test
split is the published one, and 5,000 of the training pictures, drawn by a seed, are for validation. The rest keep their
order.

Source: Tay et al. (2021), arXiv:2011.04006; Krizhevsky (2009).
Departs from the authors' code: it takes the last tenth in the order of `tensorflow_datasets` for validation, an order
that only that package has.
"""

import warnings
from pathlib import Path

import numpy as np

from nystrom.checks import check_at_least
from nystrom_lab.data.sources.cifar_files import CLASSES, SIDE, WHERE_PUBLISHED, find_cifar
from nystrom_lab.data.store.prepared_folder import holds, new_folder
from nystrom_lab.data.store.split import Pictures, PictureSplit, write_pictures

TASK = "image"
TRAIN, TEST = 50_000, 10_000


def prepare_image(
    source: Path,
    to: Path,
    *,
    val: int = 5_000,
    seed: int = 0,
    check_counts: bool = True,
) -> Path:
    """Prepare CIFAR-10 as grayscale pixels.

    Args:
        source: The folder cifar-10-batches-bin, or its archive cifar-10-binary.tar.gz, or a .npz file, also as .npz.xz,
            with x_train, y_train, x_test and y_test; or the folder that holds one of these.
        to: Folder to create. If it already holds this data set, it is reused.
        val: Number of training images to hold out for validation.
        seed: Determines which.
        check_counts: Treat an incomplete CIFAR-10 as an error; otherwise only warn.

    Returns:
        The folder, ready for `Image`.

    Raises:
        ValueError: The source is missing or broken, a setting is impossible, or `to` is in use or cannot be written.
    """
    source, to = Path(source).expanduser(), Path(to).expanduser().resolve()
    for name, value in (("val", val), ("seed", seed)):
        check_at_least(f"--{name}", value, 0)
    cifar = find_cifar(source)
    settings = {"origin": cifar.name, "sha256": cifar.digest, "val": val, "seed": seed}
    if holds(to, task=TASK, settings=settings):
        return to
    with new_folder(to, task=TASK, settings=settings) as partial:
        train, test = cifar.read()
        _check_counts(source, train, test, strict=check_counts)
        if val >= len(train.labels):
            raise ValueError(f"--val is {val} but {source} holds {len(train.labels)} training pictures: use fewer.")
        held_out = np.zeros(len(train.labels), dtype=bool)
        held_out[np.random.default_rng(seed).permutation(len(held_out))[:val]] = True
        splits = {
            "train": Pictures(*(array[~held_out] for array in train)),
            "val": Pictures(*(array[held_out] for array in train)),
            "test": test,
        }
        for split, pictures in splits.items():
            write_pictures(partial, split, [pictures], count=len(pictures.labels), side=SIDE)
    return to


class Image(PictureSplit):
    """One split of prepared pictures."""

    task = TASK
    num_labels = CLASSES
    classes = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def _check_counts(source: Path, train: Pictures, test: Pictures, *, strict: bool) -> None:
    for name, pictures, wanted in (("training", train, TRAIN), ("test", test, TEST)):
        counts = np.bincount(pictures.labels, minlength=CLASSES)
        if (counts != wanted // CLASSES).any():
            message = (
                f"{source} holds {counts.sum()} {name} pictures, {counts.tolist()} of the ten classes; CIFAR-10 has"
                f" {wanted}, {wanted // CLASSES} of each"
            )
            if strict:
                raise ValueError(f"{message}. {WHERE_PUBLISHED} Use it anyway with --no-check-counts.")
            warnings.warn(message + ".", stacklevel=3)
