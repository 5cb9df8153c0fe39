"""Pathfinder as published by the Long Range Arena: the folders pathfinder32, 64, 128 and 256 of lra_release.

    curv_baseline/  curv_contour_length_9/  curv_contour_length_14/        easy, intermediate, hard
        imgs/0/sample_0.png ...     gray pictures
        metadata/0.npy ...          text or an array of strings: a row holds folder, file, number, label and more

The rows, in the order of their files' numbers, are shuffled by a seed and split 80 / 10 / 10. The published order, that
of `tensorflow_datasets`, is not available without that package.

Nothing is unpickled: metadata with pickled objects raise an error.

Source: https://github.com/google-research/long-range-arena, `lra_benchmarks/data/pathfinder.py`.
"""

import hashlib
import struct
import sys
import zlib
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nystrom.input_files import read_input
from nystrom.progress import Progress
from nystrom_lab.data.lra.facts import AROUND
from nystrom_lab.data.store.prepared_folder import holds, new_folder
from nystrom_lab.data.store.split import Pictures, write_pictures

TASK = "pathfinder"
FOLDERS = {"easy": "curv_baseline", "intermediate": "curv_contour_length_9", "hard": "curv_contour_length_14"}
RELEASE_FORM = (
    "it is published as lra_release.gz at https://storage.googleapis.com/long-range-arena/lra_release.gz; unpack it and"
    " name its folder pathfinder{size}, which holds {folder} with imgs and metadata"
)
# This one picture was published empty.
EMPTY = ("curv_baseline", "imgs/0/sample_172.png")
AT_ONCE = 1000


class PictureLine(NamedTuple):
    """One row of metadata: its place, for messages; the picture, inside the folder of its difficulty; and its class."""

    place: str
    file: str
    label: int


def import_release(source: Path, to: Path, *, size: int, difficulty: str, seed: int) -> Path:
    """Convert published pictures to a data set that `Pathfinder` opens; arguments as in `prepare_pathfinder`.

    Raises:
        ValueError: The source is missing or damaged (row and file are named), or `to` is in use or cannot be written.
    """
    folder = find_release(source.expanduser(), size=size, difficulty=difficulty)
    rows, digest = read_picture_lines(folder)
    settings = {"origin": "published pictures", "size": size, "difficulty": difficulty, "seed": seed}
    settings |= {"metadata_sha256": digest}
    if holds(to, task=TASK, settings=settings):
        return to
    rows = check_files(folder, rows)
    order = np.random.default_rng(seed).permutation(len(rows)).tolist()
    tenth = len(rows) // 10
    cuts = {"test": order[:tenth], "val": order[tenth : 2 * tenth], "train": order[2 * tenth :]}
    with (
        new_folder(to, task=TASK, settings=settings) as partial,
        Progress(folder.name, len(rows), unit="pictures") as bar,
    ):
        for split, mine in cuts.items():
            parts = _parts(folder, [rows[i] for i in mine], size, bar)
            write_pictures(partial, split, parts, count=len(mine), side=size)
    return to


def find_release(source: Path, *, size: int, difficulty: str) -> Path:
    """Find the folder of a difficulty, the source itself or a folder inside it, or raise ValueError."""
    name = FOLDERS[difficulty]
    inside = [Path(around, f"pathfinder{size}", name) for around in AROUND]
    for folder in (source, source / name, *(source / each for each in inside)):
        if folder.resolve().name == name and (folder / "imgs").is_dir() and (folder / "metadata").is_dir():
            return folder
    raise ValueError(
        f"{source} holds no folder {name} with imgs and metadata in it: {RELEASE_FORM.format(size=size, folder=name)};"
        " or leave --from out to generate pictures."
    )


def read_picture_lines(folder: Path) -> tuple[list[PictureLine], str]:
    """Read all metadata of a difficulty, and compute their digest.

    Raises:
        ValueError: A file or row is damaged, or two rows name one picture.
    """
    files = sorted((folder / "metadata").glob("*.npy"), key=lambda file: (len(file.stem), file.stem))
    if not files:
        raise ValueError(f"{folder / 'metadata'} has no .npy file: unpack the published archive again.")
    rows: list[PictureLine] = []
    digest = hashlib.sha256()
    for file in files:
        content = read_input(file)
        digest.update(f"{file.name} {len(content)}\n".encode() + content)
        rows += _parse(file, content)
    seen: dict[str, str] = {}
    for row in rows:
        if (first := seen.setdefault(row.file, row.place)) != row.place:
            raise ValueError(
                f"{row.place} names {row.file}, as {first} does: no sample may occur twice; unpack the archive again."
            )
    return rows, digest.hexdigest()


def check_files(folder: Path, rows: list[PictureLine]) -> list[PictureLine]:
    """Compare the rows with the pictures present, and leave out the one that was published empty.

    Raises:
        ValueError: A picture has no row, or a row has no picture.
    """
    there = {file.relative_to(folder).as_posix() for file in (folder / "imgs").rglob("*.png")}
    if folder.resolve().name == EMPTY[0] and EMPTY[1] in there and not (folder / EMPTY[1]).stat().st_size:
        print(f"{folder / EMPTY[1]} was published empty; it is left out.", file=sys.stderr)
        rows = [row for row in rows if row.file != EMPTY[1]]
        there.discard(EMPTY[1])
    if missing := [row for row in rows if row.file not in there]:
        raise ValueError(
            f"{missing[0].place} names {missing[0].file}, which is not in {folder} ({len(missing)} of {len(rows)}"
            " pictures are missing): unpack the published archive again."
        )
    if extra := sorted(there - {row.file for row in rows}):
        raise ValueError(
            f"{folder} holds {len(there)} pictures but its metadata have {len(rows)} rows; none names {extra[0]}: a"
            " file of metadata is missing or cut short, unpack the published archive again."
        )
    return rows


def read_picture(path: Path, size: int) -> NDArray[np.uint8]:
    """Read one gray picture, or raise ValueError: it is damaged, of another size, or not gray."""
    from PIL import Image

    try:
        content = BytesIO(read_input(path))
        # Pixels may be complete while the checksums after them are not; this reads those too.
        with Image.open(content, formats=["PNG"]) as picture:
            picture.verify()
        with Image.open(content, formats=["PNG"]) as picture:
            if picture.size != (size, size) or picture.mode != "L":
                width, height = picture.size
                raise ValueError(
                    f"{path} is {height} x {width} of mode {picture.mode}; expected {size} x {size} gray pixels (mode"
                    f" L): name the folder pathfinder{size}, or say --size {height}."
                )
            return np.array(picture)
    except (OSError, SyntaxError, EOFError, zlib.error, struct.error, Image.DecompressionBombError) as error:
        raise ValueError(f"{path} is not a complete PNG ({error}): unpack the published archive again.") from error


def _parts(folder: Path, rows: list[PictureLine], size: int, bar: Progress) -> Iterator[Pictures]:
    for start in range(0, len(rows), AT_ONCE):
        some = rows[start : start + AT_ONCE]
        pixels = np.stack([read_picture(folder / row.file, size) for row in some])
        bar.update(len(some))
        yield Pictures(pixels, np.array([row.label for row in some], dtype=np.uint8))


def _parse(file: Path, content: bytes) -> Iterator[PictureLine]:
    # Judged by content: the published files are text, despite their name.
    if content.startswith(np.lib.format.MAGIC_PREFIX):
        lines = _array_lines(file, content)
    else:
        try:
            lines = [line.split() for line in content.decode("utf-8").splitlines()]
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{file} is neither text nor a numpy array ({error}): unpack the archive again."
            ) from error
    for number, fields in enumerate(lines, start=1):
        place = f"{file}, row {number}"
        if len(fields) < 4 or fields[3] not in ("0", "1"):
            raise ValueError(
                f"{place}, is {' '.join(fields)[:80]!r}: it must have a folder, a file, a number and a label, 0 or 1;"
                " the file is cut short or of another kind."
            )
        picture = PurePosixPath(fields[0], fields[1])
        if picture.is_absolute() or ".." in picture.parts or picture.parts[0] != "imgs":
            raise ValueError(f"{place}, names {picture}: pictures are in the folder imgs; the file is of another kind.")
        yield PictureLine(place, picture.as_posix(), int(fields[3]))


def _array_lines(file: Path, content: bytes) -> list[list[str]]:
    try:
        array = np.load(BytesIO(content), allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(
            f"{file} cannot be read ({error}). Pickled objects are never loaded, since they can run code: if you"
            " trust the file, rewrite it as text, one row per line, with blanks between the fields."
        ) from error
    if array.ndim != 2 or array.dtype.kind not in "US":
        raise ValueError(f"{file} holds {array.dtype} of shape {array.shape}; expected rows of strings.")
    return array.astype(str).tolist()
