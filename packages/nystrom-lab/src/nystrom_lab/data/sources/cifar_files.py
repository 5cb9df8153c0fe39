r"""CIFAR-10 as users hold it: the published binary folder or archive, and numpy archives.

    cifar-10-batches-bin    data_batch_1.bin ... data_batch_5.bin, test_batch.bin   3,073 bytes a picture, label first
    .npz, .npz.xz           x_train, y_train, x_test, y_test: pictures x 32 x 32, gray, or x 3, in colour

The first also as cifar-10-binary.tar.gz, which is not unpacked to disk. cifar-10-batches-py holds pickles, which are
programs: it is refused by name, with the binary release as the way out.

Colours become gray as tf.image.rgb_to_grayscale makes them, in single precision:
$\lfloor 255.5\,(0.2989 R + 0.587 G + 0.114 B) / 255 \rfloor$.

Source: Krizhevsky (2009), https://www.cs.toronto.edu/~kriz/cifar.html.
"""

import hashlib
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nystrom.input_files import read_input
from nystrom.sums import sha256
from nystrom_lab.data.sources.unpacking import BROKEN, check_unpacked, members_of, open_unpacked, unreadable
from nystrom_lab.data.store.split import Pictures

SIDE, COLOURS, CLASSES = 32, 3, 10
FOLDER, ARCHIVE = "cifar-10-batches-bin", "cifar-10-binary.tar.gz"
BATCHES = (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin")
PICKLES = ("cifar-10-batches-py", "cifar-10-python.tar.gz", "data_batch_1", "test_batch")
WHERE_PUBLISHED = (
    f"CIFAR-10 is published at https://www.cs.toronto.edu/~kriz/cifar.html as {ARCHIVE} (folder {FOLDER})."
)
ARRAY_FILES, ARCHIVE_FILES = (".npz", ".npz.xz"), (".tar.gz", ".tgz", ".tar")
ARRAYS = ("x_train", "y_train", "x_test", "y_test")
WEIGHTS = np.array([0.2989, 0.587, 0.114], dtype=np.float32)


@dataclass(frozen=True)
class CifarSource:
    """CIFAR-10 files: what they are, the SHA-256 of their content, and what reads training and test pictures."""

    name: str
    digest: str
    read: Callable[[], tuple[Pictures, Pictures]]


def find_cifar(source: Path) -> CifarSource:
    """Recognise the files at a path.

    Raises:
        ValueError: No such files, some are missing, or they are pickles.
    """
    for folder in (source, source / FOLDER):
        if any((folder / name).is_file() for name in BATCHES):
            return _folder_source(folder)
    if source.is_dir():
        inside = [source / ARCHIVE] if (source / ARCHIVE).is_file() else []
        inside = inside or sorted(path for path in source.iterdir() if path.name.endswith(ARRAY_FILES))
        if len(inside) > 1:
            raise ValueError(f"{source} holds {inside[0].name} and {inside[1].name}: name one of the files.")
        source = inside[0] if inside else source
    if source.is_file() and source.name.endswith(ARRAY_FILES):
        return CifarSource("arrays", sha256(source), lambda: _read_arrays(source))
    if pickles := [path for path in (source, *(source / name for name in PICKLES)) if _is_pickled(path)]:
        raise _pickled(pickles[0])
    if source.is_file() and source.name.endswith(ARCHIVE_FILES):
        return CifarSource("archive", sha256(source), lambda: _read_archive(source))
    came = "holds no pictures of CIFAR-10 that can be read" if source.exists() else "does not exist"
    raise ValueError(
        f"{source} {came}: name {FOLDER} or {ARCHIVE}, the folder that holds it, or a .npz file with"
        f" {', '.join(ARRAYS)}. {WHERE_PUBLISHED}"
    )


def to_gray(colours: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Make colour pictures gray; the last axis holds red, green and blue."""
    shares = colours.astype(np.float32) * np.float32(1 / 255)
    gray = shares[..., 0] * WEIGHTS[0] + shares[..., 1] * WEIGHTS[1] + shares[..., 2] * WEIGHTS[2]
    return (gray * np.float32(255.5)).astype(np.uint8)


def _is_pickled(path: Path) -> bool:
    return path.exists() and path.name in PICKLES


def _pickled(path: Path) -> ValueError:
    return ValueError(f"{path} holds pickles, which are programs and are never loaded. {WHERE_PUBLISHED}")


def _folder_source(folder: Path) -> CifarSource:
    if missing := [name for name in BATCHES if not (folder / name).is_file()]:
        raise ValueError(f"{folder} lacks {', '.join(missing)}. {WHERE_PUBLISHED}")
    whole = hashlib.sha256("".join(sha256(folder / name) for name in BATCHES).encode()).hexdigest()
    return CifarSource(folder.name, whole, lambda: _read_batches(folder, lambda name: read_input(folder / name)))


def _read_batches(source: Path, content: Callable[[str], bytes]) -> tuple[Pictures, Pictures]:
    """Read the batches, in their order; the last one is the test."""
    batches, seen = [], dict[bytes, str]()
    for name in BATCHES:
        batch = content(name)
        if (same := seen.setdefault(hashlib.sha256(batch).digest(), name)) != name:
            raise ValueError(
                f"{source} holds the same pictures as {same} and {name}, so they would occur twice: unpack the archive"
                f" again. {WHERE_PUBLISHED}"
            )
        batches.append(_read_batch(batch, f"{source}/{name}"))
    train = Pictures(*(np.concatenate(arrays) for arrays in zip(*batches[:-1], strict=True)))
    return train, batches[-1]


def _read_batch(content: bytes, place: str) -> Pictures:
    row = 1 + COLOURS * SIDE * SIDE
    if not content or len(content) % row:
        raise ValueError(
            f"{place} has {len(content)} bytes, not a whole number of pictures of {row} bytes: it is cut short or of"
            f" another kind. {WHERE_PUBLISHED}"
        )
    rows = np.frombuffer(content, dtype=np.uint8).reshape(-1, row)
    colours = rows[:, 1:].reshape(-1, COLOURS, SIDE, SIDE).transpose(0, 2, 3, 1)
    return Pictures(to_gray(colours), _checked(rows[:, 0], place))


def _checked(labels: NDArray[Any], place: str) -> NDArray[np.uint8]:
    if (wrong := np.flatnonzero((labels < 0) | (labels >= CLASSES))).size:
        raise ValueError(
            f"{place}, picture {wrong[0]}, has the label {labels[wrong[0]]}; CIFAR-10 has 0 to {CLASSES - 1}, so the"
            f" file is damaged or of another kind. {WHERE_PUBLISHED}"
        )
    return labels.astype(np.uint8)


def _read_archive(path: Path) -> tuple[Pictures, Pictures]:
    batches: dict[str, bytes] = {}
    for member, read in members_of(path):
        name = PurePosixPath(member.name)
        if name.parent.name in PICKLES:
            raise _pickled(path)
        if member.isfile() and name.parent.name == FOLDER and name.name in BATCHES:
            batches[name.name] = read()
    if missing := [name for name in BATCHES if name not in batches]:
        raise ValueError(f"{path} lacks {', '.join(missing)}. {WHERE_PUBLISHED}")
    return _read_batches(path, batches.__getitem__)


def _read_arrays(path: Path) -> tuple[Pictures, Pictures]:
    try:
        with open_unpacked(path) as file:
            content = BytesIO(file.read())
        with zipfile.ZipFile(content) as members:
            check_unpacked(path, sum(member.file_size for member in members.infolist()))
        try:
            with np.load(content, allow_pickle=False) as stored:
                arrays = {name: stored[name] for name in ARRAYS if name in stored.files}
        except (ValueError, AttributeError, MemoryError) as error:
            raise ValueError(
                f"{path} is not an archive of plain arrays ({error}); pickled ones are never loaded."
            ) from error
    except BROKEN as error:
        raise unreadable(path, error) from error
    if missing := [name for name in ARRAYS if name not in arrays]:
        raise ValueError(f"{path} lacks {', '.join(missing)}: it must hold {', '.join(ARRAYS)}.")
    train, test = (_from_arrays(arrays[f"x_{split}"], arrays[f"y_{split}"], path, split) for split in ("train", "test"))
    if train.pixels.shape == test.pixels.shape and (train.pixels == test.pixels).all():
        raise ValueError(f"{path} holds the same pictures in x_train and x_test: one of them is wrong.")
    return train, test


def _from_arrays(pixels: NDArray[Any], labels: NDArray[Any], path: Path, split: str) -> Pictures:
    labels = labels.reshape(-1)
    shape = (labels.size, SIDE, SIDE)
    if pixels.dtype != np.uint8 or pixels.shape not in (shape, (*shape, COLOURS)) or labels.dtype.kind not in "ui":
        raise ValueError(
            f"{path} holds x_{split} as {pixels.dtype} of shape {pixels.shape} and y_{split} as {labels.dtype};"
            f" expected uint8 of shape {shape}, gray, or {(*shape, COLOURS)}, in colour, and whole numbers."
        )
    return Pictures(to_gray(pixels) if pixels.ndim > 3 else pixels, _checked(labels, f"{path}, y_{split}"))
