"""Pathfinder of the Long Range Arena: draw the data set or read the published one, and open it.

A picture shows dashed snakes and two discs; its class is 1 if the discs are on one snake. `curves` describes what is
drawn; "hard" is long snakes of 14 dashes, "intermediate" of 9, "easy" of 6. Both papers train on hard pictures
of 32 x 32, 160,000 / 20,000 / 20,000.

The draw depends on the seed alone. Pictures come in chunks of a size that only `size` decides, chunk i from the i-th
child of `numpy.random.SeedSequence(seed)`, whichever process draws it. The first ones form the test split, the next the
validation split, the rest the training split, so more training data leave the other two unchanged. One of every two
consecutive pictures is of class 1.

Source: Tay et al. (2021), arXiv:2011.04006; Linsley et al. (2018), arXiv:1805.08315.
Departs from the published data: the draw has a seed; the classes are balanced.
"""

import multiprocessing
import signal
from collections.abc import Generator, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

from nystrom.checks import check_at_least, check_choice
from nystrom.progress import Progress
from nystrom_lab.data.lra.chunks import child_generator, in_order
from nystrom_lab.data.lra.pathfinder.curves import draw_pictures
from nystrom_lab.data.lra.pathfinder.dashes import GEOMETRIES, Geometry
from nystrom_lab.data.lra.pathfinder.release import import_release
from nystrom_lab.data.store.prepared_folder import holds, new_folder
from nystrom_lab.data.store.split import Pictures, PictureSplit, write_pictures
from nystrom_lab.measure.rows import cores

TASK = "pathfinder"
CONTOURS = {"easy": 6, "intermediate": 9, "hard": 14}
PUBLISHED_SIZES = {"test": 20_000, "val": 20_000, "train": 160_000}


def prepare_pathfinder(
    to: Path,
    *,
    source: Path | None = None,
    size: int = 32,
    difficulty: Literal["easy", "intermediate", "hard"] = "hard",
    contour: int | None = None,
    train: int | None = None,
    val: int | None = None,
    test: int | None = None,
    seed: int = 0,
    workers: int | None = None,
) -> Path:
    """Generate the Pathfinder data set of the Long Range Arena, or read the published one.

    It uses several processes, so a script must call this under `if __name__ == "__main__":`, or with one worker.

    Args:
        to: Folder to create. If it already holds a data set with these settings, it is reused.
        source: A folder pathfinder32, 64, 128 or 256 of the published lra_release to read instead of generating images.
            It is split 80 / 10 / 10.
        size: Rows and columns of a picture: 32, 64, 128 or 256.
        difficulty: Length of the long snakes.
        contour: Dashes of a long snake, in place of a difficulty; the fewer, the easier. 3 at least, of which a
            short snake has one.
        train: Pictures for training; 160,000 if not given.
        val: Pictures for validation; 20,000 if not given.
        test: Pictures for the test; 20,000 if not given.
        seed: Determines the pictures, or the split of published ones.
        workers: Processes to draw with; all cores if not given. They do not change the result.

    Returns:
        The folder, ready for `Pathfinder`.

    Raises:
        ValueError: A setting is impossible, the source is missing or damaged (row and file are named), or the folder is
            in use or cannot be written.
    """
    to = Path(to).expanduser().resolve()
    counts = {"test": test, "val": val, "train": train}
    _check(size, difficulty, contour, counts, seed, workers)
    if source is not None:
        if contour is not None:
            raise ValueError(
                f"contour is {contour}, but published pictures are easy, intermediate or hard: leave it out, or leave "
                "--from out to have pictures drawn."
            )
        if given := [name for name, count in counts.items() if count is not None]:
            raise ValueError(
                f"{', '.join(given)} cannot be chosen for published pictures, which are split 80 / 10 / 10: leave it"
                " out, or leave --from out to have pictures drawn."
            )
        return import_release(Path(source), to, size=size, difficulty=difficulty, seed=seed)
    sizes = {name: PUBLISHED_SIZES[name] if count is None else count for name, count in counts.items()}
    if not any(sizes.values()):
        raise ValueError("train, val and test are all 0: ask for at least one picture.")
    settings = {"origin": "generated", "size": size, "difficulty": difficulty, **sizes, "seed": seed}
    if contour is not None:
        settings = {**settings, "difficulty": "as its contour", "contour": contour}
    if holds(to, task=TASK, settings=settings):
        return to
    geometry = replace(GEOMETRIES[size], contour=CONTOURS[difficulty] if contour is None else contour)
    total = sum(sizes.values())
    with (
        new_folder(to, task=TASK, settings=settings) as partial,
        closing(_chunks(seed, geometry, total, workers or cores())) as chunks,
        Progress("Pathfinder", total, unit="pictures") as bar,
    ):
        stream = _Stream(chunks, bar)
        for split, count in sizes.items():
            write_pictures(partial, split, stream.take(count), count=count, side=size)
    return to


class Pathfinder(PictureSplit):
    """One split of prepared pictures; class 1 is two discs on one snake."""

    task = TASK
    num_labels = 2
    classes = ("apart", "joined")


def _check(
    size: int, difficulty: str, contour: int | None, sizes: dict[str, int | None], seed: int, workers: int | None
) -> None:
    if size not in GEOMETRIES:
        raise ValueError(f"--size is {size}; expected one of {', '.join(map(str, GEOMETRIES))}.")
    check_choice("--difficulty", difficulty, CONTOURS)
    if contour is not None and not 3 <= contour <= CONTOURS["hard"]:
        raise ValueError(
            f"contour must be 3 to {CONTOURS['hard']} dashes, got {contour}: leave it out for {difficulty!r}."
        )
    if contour is not None and difficulty != "hard":
        raise ValueError(f"contour is {contour} and difficulty {difficulty!r}, which has its own: give one of the two.")
    for name, value, least in (*((name, count, 0) for name, count in sizes.items()), ("workers", workers, 1)):
        if value is not None:
            check_at_least(f"--{name}", value, least)
    check_at_least("--seed", seed, 0)


class _Stream:
    """Chunks of pictures, handed out in pieces of any size."""

    def __init__(self, chunks: Iterator[Pictures], bar: Progress):
        self._chunks, self._bar, self._rest = chunks, bar, None

    def take(self, count: int) -> Iterator[Pictures]:
        """Yield the next `count` pictures, in parts."""
        while count:
            pixels, labels = self._rest or next(self._chunks)
            self._rest = Pictures(pixels[count:], labels[count:]) if len(labels) > count else None
            piece = Pictures(pixels[:count], labels[:count])
            count -= len(piece.labels)
            self._bar.update(len(piece.labels))
            yield piece


def chunk_size(geometry: Geometry) -> int:
    """Pictures in a chunk: a few seconds of work."""
    return {32: 2048, 64: 128, 128: 64, 256: 128}[geometry.size]


def draw_chunk(seed: int, number: int, geometry: Geometry) -> Pictures:
    """Draw one chunk of pictures."""
    scenes = draw_pictures(child_generator(seed, number), chunk_size(geometry), geometry)
    return Pictures(scenes.pictures, scenes.labels)


def _chunks(seed: int, geometry: Geometry, total: int, workers: int) -> Generator[Pictures, None, None]:
    """Yield the chunks in order, a few of them drawn ahead."""
    numbers = range(-(-total // chunk_size(geometry)))
    if min(workers, len(numbers)) == 1:
        for number in numbers:
            yield draw_chunk(seed, number, geometry)
        return
    # Fresh processes: a fork would copy the locks of threads that other libraries run.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(workers, len(numbers)), mp_context=context, initializer=_leave_interrupts)
    try:
        yield from in_order(pool, partial(draw_chunk, seed, geometry=geometry), numbers, ahead=workers + 2)
    except BrokenProcessPool as error:
        raise OSError(
            f"a process that drew pictures was ended by the system, perhaps for lack of memory: try workers=1, got"
            f" {workers}; a script calls prepare_pathfinder under `if __name__ == '__main__':`."
        ) from error


def _leave_interrupts() -> None:
    # The process that waits for this one handles an interruption.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
