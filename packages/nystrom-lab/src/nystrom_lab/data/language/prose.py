"""Prose: from the user's files, or from the language reference that is included in Python."""

import hashlib
import platform
from collections.abc import Sequence
from pathlib import Path

from nystrom_lab.data.language.encoder_texts import Prose
from nystrom_lab.data.sources.documents import CHECKED, check_text, whole_characters
from nystrom_lab.data.sources.unpacking import BROKEN, open_unpacked, unreadable

# Characters that are read: enough for every study, so that a corpus of gigabytes is not.
_ENOUGH = 2_000_000


def read_prose(files: Sequence[Path], *, most: int = _ENOUGH) -> Prose:
    """Read running text, compressed or not.

    Args:
        files: UTF-8 files; none means the Python language reference (`pydoc_data.topics`).
        most: Maximum number of characters to read.

    Raises:
        ValueError: A file is missing, empty, damaged or not text.
    """
    if not files:
        from pydoc_data.topics import topics

        text, name = "\n\n".join(topics[key] for key in sorted(topics)), f"reference of Python {_python()}"
    else:
        parts = [_read(file, most) for file in files]
        text, name = "\n\n".join(parts), " ".join(file.name for file in files)
    text = text[:most]
    return Prose(f"{name} (sha256 {hashlib.sha256(text.encode()).hexdigest()[:12]})", text)


def _read(file: Path, most: int) -> str:
    try:
        with open_unpacked(file) as stream:
            content = stream.read(most)
        check_text(file, content[:CHECKED])
        # The cut may be inside a character.
        text = content[: whole_characters(content) if len(content) == most else None].decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text ({error.reason} at byte {error.start}): name text files.") from None
    except BROKEN as error:
        raise unreadable(file, error) from error
    if not text.strip():
        raise ValueError(f"{file} is empty: name a file of prose.")
    return text


def _python() -> str:
    return ".".join(platform.python_version_tuple()[:2])
