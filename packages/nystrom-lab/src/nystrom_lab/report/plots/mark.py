"""The mark in pictures drawn by this project: they may be replaced, and no other picture is overwritten.

The name is stored where the formats name the program: in PNG the text `Software`, in SVG the creator.
"""

import os
import re
from pathlib import Path

MARK = "nystrom"
# In a PNG file, a chunk of text with its length, as matplotlib and Pillow write it before the pixels.
_TEXT = f"Software\0{MARK}".encode()
_PNG = len(_TEXT).to_bytes(4, "big") + b"tEXt" + _TEXT
_SVG = re.compile(rb"<dc:creator>\s*<cc:Agent>\s*<dc:title>%b</dc:title>" % MARK.encode())
# Bytes to read; the mark comes far earlier.
_BEGINNING = 8192


def check_free(path: Path) -> None:
    """Check that a file does not exist, or is a picture drawn by this project, or raise ValueError."""
    if os.path.lexists(path) and not _is_marked(path):
        raise ValueError(
            f"{path} already exists and is not a picture that nystrom drew: choose another name, or remove it first."
        )


def _is_marked(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        beginning = file.read(_BEGINNING)
    png = beginning.startswith(b"\x89PNG\r\n\x1a\n")
    return _PNG in beginning if png else _SVG.search(beginning) is not None
