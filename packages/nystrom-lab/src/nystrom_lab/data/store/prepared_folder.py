"""Prepared folders: check for one, create it, and compare its checksums; and the checksums of what they are made of."""

import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from nystrom.input_files import open_input
from nystrom.progress import Progress
from nystrom.sums import sha256
from nystrom.temporary import temporary_folder
from nystrom.whole_files import NO_SPACE, check_replaceable
from nystrom_lab.data.store.token_files import (
    HEADER,
    SPLITS,
    DataSettings,
    damaged,
    describe_splits,
    open_split,
    read_header,
    write_header,
)


def holds(folder: Path, *, task: str, settings: DataSettings) -> bool:
    """Whether the folder already holds this data set (True, with a message) or is free for it (False).

    Raises:
        ValueError: The folder holds something else, or a damaged data set.
    """
    try:
        names = sorted(path.name for path in folder.iterdir())
    except FileNotFoundError:
        return False
    except NotADirectoryError as error:
        raise ValueError(f"{folder} is a file or inside one: name a folder that does not exist yet.") from error
    except OSError as error:
        raise ValueError(f"{folder} cannot be read ({error.strerror}): name a folder you may write to.") from error
    if not names:
        return False
    if HEADER not in names:
        raise ValueError(
            f"{folder} is not empty and holds no data set ({HEADER} is missing, {names[0]} is there): name a folder"
            " that does not exist yet."
        )
    there = read_header(folder, task)["settings"]
    if differing := [key for key in sorted({*there, *settings}) if there.get(key) != settings.get(key)]:
        listed = ", ".join(f"{key}={there.get(key)} there and {settings.get(key)} asked for" for key in differing)
        raise ValueError(f"{folder} holds a data set with other settings ({listed}): name another folder.")
    for split in SPLITS:
        open_split(folder, split, task=task)
    print(f"{folder} already holds this data set; it is reused.", file=sys.stderr)
    return True


def cannot_be_made(to: Path, error: OSError) -> ValueError:
    """The error for a folder that cannot be made."""
    return ValueError(
        f"{to} cannot be made ({error.strerror}: {error.filename}): name a folder inside one you may write to."
    )


@contextmanager
def folder_to_fill(to: Path) -> Iterator[Path]:
    """Give a folder beside `to` to write into; the caller renames it, and it is removed if the block fails.

    Leftovers of killed processes from earlier attempts at `to` are removed.

    Raises:
        ValueError: The folder cannot be made; raised on entry, before any work.
        OSError: The disk is full.
    """
    check_replaceable(to)
    with ExitStack() as stack:
        try:
            to.parent.mkdir(parents=True, exist_ok=True)
            partial = stack.enter_context(temporary_folder(to))
        except OSError as error:
            raise cannot_be_made(to, error) from error
        try:
            yield partial
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            raise OSError(
                f"{to} cannot be written ({error.strerror}): free space, or name a folder on another disk."
            ) from error


@contextmanager
def new_folder(
    to: Path, *, task: str, settings: DataSettings, facts: Mapping[str, Any] | None = None
) -> Iterator[Path]:
    """Give a folder to write splits into, which becomes `to` when the block ends, and is removed if it fails.

    The settings determine the data and are known before the work; `facts` are found on the way, and read at its end.

    Raises:
        ValueError: `to` cannot be written; raised on entry, before any work.
        OSError: The disk is full.
    """
    with folder_to_fill(to) as partial:
        yield partial
        splits = describe_splits(partial)
        paths = sorted(path for path in partial.iterdir() if path.is_file())
        files = {path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)} for path in paths}
        described = {"facts": dict(facts)} if facts else {}
        write_header(partial, {"task": task, "settings": dict(settings), **described, "splits": splits, "files": files})
        try:
            # Takes the place of an empty folder as well.
            partial.replace(to)
        except OSError:
            # Another process may have made the same data set in the meantime; then its folder serves as well.
            if not holds(to, task=task, settings=settings):
                raise


def verify(
    folder: Path, *, task: str | None = None, report: Callable[[str, str | None], None] = lambda name, problem: None
) -> None:
    """Read every file of a prepared folder, of a task if one is named, and compare it with the recorded checksums.

    `report` is called for each file, with its name and what is wrong with it, or None.

    Raises:
        ValueError: The folder is not prepared or of another task, or a file is missing or differs; the first is named.
    """
    header = read_header(folder, task)
    files = Progress("checksums", len(header["files"]), unit="files").over(header["files"].items())
    problems = {name: _problem(folder / name, wanted) for name, wanted in files}
    for name, problem in problems.items():
        report(name, problem)
    for name, problem in problems.items():
        if problem is not None:
            raise damaged(folder / name, problem, header["task"])
    for split in SPLITS:
        open_split(folder, split, task=header["task"])


def _problem(path: Path, wanted: Mapping[str, Any]) -> str | None:
    if not path.is_file():
        return "is missing"
    if (size := path.stat().st_size) != wanted["bytes"]:
        return f"has {size} bytes instead of {wanted['bytes']}"
    if (came := sha256(path)) != wanted["sha256"]:
        return f"has SHA-256 {came} instead of {wanted['sha256']}"
    return None


def sha256_of_splits(files: Mapping[str, Path]) -> dict[str, str]:
    """Hash the file of each split.

    Raises:
        ValueError: Two splits have the same file, or files with the same content.
    """
    known: dict[str, str] = {}
    for split, path in Progress("checksums", len(files), unit="files").over(files.items()):
        if (same := known.setdefault(sha256(path), split)) != split:
            raise ValueError(
                f"{files[same]} and {path} are the same file, so {same} and {split} would hold the same samples: put"
                " the right one in place, or leave one out where a split may be missing."
            )
    return {split: digest for digest, split in known.items()}


def sha256_of_files(folder: Path, paths: Sequence[Path]) -> str:
    """Digest the names, within a folder, and the contents of files, and say how far it is."""
    digest = hashlib.sha256()
    what = f"{folder.name}, checksums"
    for path in Progress(what, len(paths), unit="files").over(paths):
        digest.update(f"{path.relative_to(folder).as_posix()}\n{path.stat().st_size}\n".encode())
        with open_input(path) as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()
