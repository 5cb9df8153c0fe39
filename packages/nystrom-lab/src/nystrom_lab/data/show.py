"""Show samples of a prepared data set: texts are printed, images are drawn as a grid, with their classes above them."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from nystrom.checks import check_at_least, check_names
from nystrom.whole_files import whole_file
from nystrom_lab.data.language.mlm_sop.dataset import IGNORED, MlmSop
from nystrom_lab.data.lra.image import Image
from nystrom_lab.data.lra.listops.expressions import VOCABULARY
from nystrom_lab.data.lra.listops.task import ListOps
from nystrom_lab.data.lra.pathfinder.task import Pathfinder
from nystrom_lab.data.lra.texts.retrieval import Retrieval
from nystrom_lab.data.lra.texts.reviews import Text
from nystrom_lab.data.store.split import PictureSplit, Split
from nystrom_lab.report.plots.mark import MARK, check_free

# A picture is enlarged by a whole factor, so that its pixels stay squares, to at least this many pixels.
SHOWN_SIDE, GAP, CAPTION = 192, 12, 18


def write_grid(pictures: Sequence[NDArray[np.uint8]], captions: Sequence[str], to: Path) -> None:
    """Draw a grid of square gray pictures of one size, each with a line of text, into a PNG file.

    Raises:
        ValueError: There is nothing to draw, the name has another ending, or the file exists and is not a picture of
            this project.
        OSError: The file cannot be written.
    """
    from PIL import Image, ImageDraw
    from PIL.PngImagePlugin import PngInfo

    if to.suffix.lower() != ".png":
        raise ValueError(f"to is {to}; a grid of pictures is a PNG file, so the name must end in .png.")
    check_free(to)
    if not pictures:
        raise ValueError("there are no pictures to draw: ask for at least one, of a split that is not empty.")
    factor = math.ceil(SHOWN_SIDE / pictures[0].shape[0])
    side = factor * pictures[0].shape[0]
    columns = math.ceil(math.sqrt(len(pictures)))
    rows = math.ceil(len(pictures) / columns)
    across, down = side + GAP, side + GAP + CAPTION
    grid = Image.new("L", (GAP + columns * across, GAP + rows * down), 255)
    pen = ImageDraw.Draw(grid)
    for i, (picture, caption) in enumerate(zip(pictures, captions, strict=True)):
        left, top = GAP + i % columns * across, GAP + i // columns * down
        pen.text((left, top), caption, fill=0)
        grid.paste(Image.fromarray(picture.repeat(factor, axis=0).repeat(factor, axis=1)), (left, top + CAPTION))
    to.parent.mkdir(parents=True, exist_ok=True)
    mark = PngInfo()
    mark.add_text("Software", MARK)
    with whole_file(to) as partial:
        grid.save(partial, format="PNG", pnginfo=mark)


SHOWN_TOKENS = 600
SPLIT_OF: dict[str, type[Split]] = {
    split.task: split for split in cast("list[type[Split]]", [ListOps, Text, Retrieval, Image, Pathfinder])
}


def show(task: str, data: Path, *, split: str = "train", count: int = 4, to: Path | None = None) -> Iterator[str]:
    """Show some samples of a prepared data set, spread evenly over a split.

    Args:
        task: Which task.
        data: Prepared folder of the task.
        split: train, val or test.
        count: How many samples.
        to: PNG file to write, for image tasks.

    Yields:
        Text to print.

    Raises:
        ValueError: The task is unknown, the folder holds no data of it, or `to` does not match the task.
    """
    check_names("task", [task], [*SPLIT_OF, MlmSop.task])
    check_at_least("--count", count, 1)
    kind = SPLIT_OF.get(task, MlmSop)
    samples = kind(Path(data).expanduser(), split)
    numbers = np.linspace(0, len(samples) - 1, min(count, len(samples))).round().astype(int).tolist()
    if isinstance(samples, PictureSplit):
        yield _draw(samples, numbers, to)
        return
    if to is not None:
        raise ValueError(f"--to is {to}, but {task} is printed and makes no picture: leave it out.")
    if isinstance(samples, MlmSop):
        for text in _instances(samples, numbers):
            yield _printable(text, keep="\n")
        return
    for number in numbers:
        yield _words(samples, number) if isinstance(samples, ListOps) else _texts(samples, number)


def _instances(data: MlmSop, numbers: Sequence[int]) -> Iterator[str]:
    """Instances of the first epoch; a chosen token is shown as {model input=original token}."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(data.folder / "tokenizer.json"))
    for number in numbers:
        sample, place = data[number], data.stretches(np.array([number]))
        ids, labels = sample["input_ids"].tolist(), sample["labels"].tolist()
        words = []
        for token, label in zip(ids[:SHOWN_TOKENS], labels[:SHOWN_TOKENS], strict=True):
            shown = tokenizer.id_to_token(token)
            words.append(shown if label == IGNORED else f"{{{shown}={tokenizer.id_to_token(label)}}}")
        chosen = sum(label != IGNORED for label in labels)
        order = "swapped" if sample["sentence_order_label"] else "in order"
        head = (
            f"{data.split} {number}: document {place.document[0]}, tokens {place.start[0]} to {place.stop[0] - 1};"
            f" segments {order}, {chosen} of {len(ids)} tokens to predict"
        )
        yield f"{head}\n{' '.join(words)}{' ...' if len(ids) > SHOWN_TOKENS else ''}\n"


def _words(samples: ListOps, number: int) -> str:
    sample = samples[number]
    tokens = np.asarray(sample["input_ids"])
    words = " ".join(VOCABULARY[token] for token in tokens[:SHOWN_TOKENS])
    more = " ..." if tokens.size > SHOWN_TOKENS else ""
    return f"{samples.split} {number}: value {sample['labels']}, {tokens.size} tokens\n{words}{more}\n"


def _texts(samples: Split, number: int) -> str:
    sample = samples[number]
    texts: Sequence[NDArray[np.int16]] = (
        sample["input_ids"] if isinstance(sample["input_ids"], tuple) else (sample["input_ids"],)
    )
    lengths = " and ".join(str(tokens.size) for tokens in texts)
    label = _printable(samples.classes[int(sample["labels"])])
    return "\n".join([f"{samples.split} {number}: class {label}, {lengths} bytes", *map(_readable, texts), ""])


def _draw(samples: PictureSplit, numbers: Sequence[int], to: Path | None) -> str:
    if to is None:
        raise ValueError(f"--to is missing: {samples.task} is shown as a grid; name a file such as grid.png.")
    captions = [f"{samples.split} {number}: {samples.classes[samples.labels[number]]}" for number in numbers]
    write_grid([samples.picture(number) for number in numbers], captions, Path(to).expanduser())
    return str(to)


def _readable(tokens: NDArray[np.int16]) -> str:
    """The beginning of a text on one line; invalid UTF-8 bytes are shown as numbers."""
    text = (tokens[:SHOWN_TOKENS] - 1).astype(np.uint8).tobytes().decode("utf-8", errors="backslashreplace")
    return _printable(text) + (" ..." if tokens.size > SHOWN_TOKENS else "")


def _printable(text: str, *, keep: str = "") -> str:
    # Nothing in a text may steer the terminal.
    return "".join(letter if letter.isprintable() or letter in keep else ascii(letter)[1:-1] for letter in text)
