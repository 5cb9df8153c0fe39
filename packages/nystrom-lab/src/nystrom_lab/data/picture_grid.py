"""A grid of pictures with their classes above them, as PNG."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nystrom.whole_files import whole_file
from nystrom_lab.report.plots.mark import MARK, check_free

# A picture is enlarged by a whole factor, so that its pixels stay squares, to at least this many pixels.
SHOWN_SIDE, GAP, CAPTION = 192, 12, 18


def write_grid(pictures: Sequence[NDArray[np.uint8]], captions: Sequence[str], to: Path) -> None:
    """Draw a grid of square pictures of one size.

    Args:
        pictures: Gray pixels.
        captions: A line of text for each.
        to: File to write; its name ends in .png.

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
