"""Look at samples of a prepared data set: one line of `SHOWN` for each task.

A task is shown by a function that takes the folder, the split, the numbers of the samples, and where to write a picture
if it makes one; it gives what is to be printed, a string for each sample or for the picture.
"""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nystrom.tasks.lra.image import Image
from nystrom.tasks.lra.listops.expressions import VOCABULARY
from nystrom.tasks.lra.listops.task import ListOps
from nystrom.tasks.lra.pathfinder.task import Pathfinder
from nystrom.tasks.lra.texts.retrieval import Retrieval
from nystrom.tasks.lra.texts.reviews import Text
from nystrom.tasks.picture_grid import write_grid
from nystrom.tasks.store.byte_split import ByteSplit
from nystrom.tasks.store.picture_files import PictureSplit
from nystrom.tasks.store.token_files import open_split

SHOWN_TOKENS = 600

Show = Callable[[Path, str, list[int], Path | None], Iterable[str]]


def show(task: str, data: Path, *, split: str = "train", count: int = 4, to: Path | None = None) -> Iterator[str]:
    """Show some samples of a prepared data set, spread evenly over a split.

    Args:
        task: Which task.
        data: Its prepared folder.
        split: One of train, val and test.
        count: How many samples.
        to: Where a task of pictures writes them, as PNG.

    Yields:
        What is to be printed.

    Raises:
        ValueError: The task is unknown, or the folder holds no data of it.
    """
    if task not in SHOWN:
        raise ValueError(f"task {task!r} is unknown; expected one of {', '.join(SHOWN)}.")
    if count < 1:
        raise ValueError(f"count must be at least 1, got {count}.")
    data = Path(data).expanduser()
    samples = open_split(data, split, task=task).labels.size
    numbers = np.linspace(0, samples - 1, min(count, samples)).round().astype(int).tolist()
    yield from SHOWN[task](data, split, numbers, to)


def _show_listops(data: Path, split: str, numbers: list[int], to: Path | None) -> Iterator[str]:
    _no_picture("listops", to)
    samples = ListOps(data, split)
    for number in numbers:
        sample = samples[number]
        tokens = np.asarray(sample["input_ids"])
        words = " ".join(VOCABULARY[token] for token in tokens[:SHOWN_TOKENS])
        more = " ..." if tokens.size > SHOWN_TOKENS else ""
        yield f"{split} {number}: value {sample['labels']}, {tokens.size} tokens\n{words}{more}\n"


def _show_text(data: Path, split: str, numbers: list[int], to: Path | None) -> Iterator[str]:
    _no_picture("text", to)
    yield from _texts(Text(data, split), numbers)


def _show_retrieval(data: Path, split: str, numbers: list[int], to: Path | None) -> Iterator[str]:
    _no_picture("retrieval", to)
    yield from _texts(Retrieval(data, split), numbers)


def _texts(samples: ByteSplit, numbers: list[int]) -> Iterator[str]:
    for number in numbers:
        sample = samples[number]
        texts = sample["input_ids"] if isinstance(sample["input_ids"], tuple) else (sample["input_ids"],)
        lengths = " and ".join(str(tokens.size) for tokens in texts)
        label = _printable(samples.classes[sample["labels"]])
        yield "\n".join([f"{samples.split} {number}: class {label}, {lengths} bytes", *map(_readable, texts), ""])


def _show_image(data: Path, split: str, numbers: list[int], to: Path | None) -> Iterator[str]:
    yield _pictures(Image(data, split), numbers, to)


def _show_pathfinder(data: Path, split: str, numbers: list[int], to: Path | None) -> Iterator[str]:
    yield _pictures(Pathfinder(data, split), numbers, to)


def _pictures(samples: PictureSplit, numbers: list[int], to: Path | None) -> str:
    if to is None:
        raise ValueError(
            f"to is missing: {samples.task} is shown as a grid of pictures, so name a file such as grid.png."
        )
    captions = [f"{samples.split} {number}: {samples.classes[samples.labels[number]]}" for number in numbers]
    write_grid([samples.picture(number) for number in numbers], captions, Path(to).expanduser())
    return str(to)


def _readable(tokens: NDArray[np.int16]) -> str:
    """Give the beginning of a text in one line; bytes that are no UTF-8 are shown by their numbers."""
    text = (tokens[:SHOWN_TOKENS] - 1).astype(np.uint8).tobytes().decode("utf-8", errors="backslashreplace")
    return _printable(text) + (" ..." if tokens.size > SHOWN_TOKENS else "")


def _printable(text: str) -> str:
    # Whatever a text holds, it does not steer the terminal.
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def _no_picture(task: str, to: Path | None) -> None:
    if to is not None:
        raise ValueError(f"to is {to}, but {task} is printed and makes no picture: leave it out.")


SHOWN: dict[str, Show] = {
    "listops": _show_listops,
    "text": _show_text,
    "retrieval": _show_retrieval,
    "image": _show_image,
    "pathfinder": _show_pathfinder,
}
