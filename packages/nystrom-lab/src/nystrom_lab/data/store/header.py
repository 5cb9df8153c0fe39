"""The header of a prepared folder: `dataset.json`, written last, so that a folder which has it is complete.

format version numpy        of the files
task settings facts         what was prepared, what determines its samples, and what was found on the way
splits                      of each split: samples, tokens, how many samples of each class
files                       size and SHA-256 of each file
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from nystrom.whole_files import write_whole

FORMAT, VERSION = "nystrom-tokens", 1
HEADER = "dataset.json"
SPLITS = ("train", "val", "test")
# Their data can be drawn; all others are prepared from files.
DRAWN = ("listops", "pathfinder")
# Their data are tokens of a tokenizer.
TOKENIZED = ("mlm-sop",)

DataSettings = Mapping[str, int | float | str]


def prepare_command(task: str, *, source: Path | str = "FILES", to: Path | str) -> str:
    """The command that prepares the data of a task."""
    files = "" if task in DRAWN and source == "FILES" else f" --from {source}"
    tokenizer = " --tokenizer FOLDER" if task in TOKENIZED else ""
    return f"`nystrom data prepare {task}{files}{tokenizer} --to {to}`"


def damaged(path: Path, came: str, task: str) -> ValueError:
    """The error for a prepared folder with a modified file."""
    return ValueError(
        f"{path} {came}: the prepared data are damaged. Prepare them again, into a folder that does not exist yet, with"
        f" {prepare_command(task, to='NEW_FOLDER')}."
    )


def write_header(folder: Path, header: Mapping[str, Any]) -> None:
    """Write the header; the format, its version and that of numpy are added."""
    marked = {"format": FORMAT, "version": VERSION, "numpy": np.__version__, **header}
    write_whole(folder / HEADER, json.dumps(marked, indent=1) + "\n")


def read_header(folder: Path, task: str | None = None) -> dict[str, Any]:
    """Read and check the header of a prepared folder.

    Args:
        folder: The folder.
        task: The task that it must be of; None for any.

    Raises:
        ValueError: The folder is missing or not prepared, the header is damaged, or the data are of another task.
    """
    path, named = folder / HEADER, task or "TASK"
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder: prepare the data with {prepare_command(named, to=folder)}.")
    if not path.is_file():
        raise ValueError(
            f"{folder} is not prepared ({HEADER} is missing): name a folder that `nystrom data prepare` made, or"
            f" prepare what is in this one with {prepare_command(named, source=folder, to=f'data/{named}')}."
        )
    try:
        header = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"is not JSON ({error})", named) from error
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise damaged(path, f"is not the header of a data set in the format {FORMAT}", named)
    if header.get("version") != VERSION:
        raise damaged(path, f"has version {header.get('version')} of the format instead of {VERSION}", named)
    if wrong := _wrong_field(header):
        raise damaged(path, f"has no proper field {wrong}", named)
    if task not in (None, header["task"]):
        raise ValueError(f"{folder} holds the data of {header['task']}, not of {task}: name the folder of {task}.")
    return header


def read_facts(folder: Path, *, task: str) -> dict[str, Any]:
    """Read the facts recorded when the data were prepared; empty if there are none.

    Raises:
        ValueError: The folder holds no complete data set of the task.
    """
    return read_header(folder, task).get("facts", {})


def _wrong_field(header: Mapping[str, Any]) -> str | None:
    """Name the first field that is missing or of another type."""
    kinds = {"task": str, "settings": dict, "splits": dict, "files": dict, "facts": dict}
    for name, kind in kinds.items():
        if not isinstance(header.get(name, {} if name == "facts" else None), kind):
            return name
    for split in SPLITS:
        counts = header["splits"].get(split)
        if not isinstance(counts, dict):
            return f"splits.{split}"
        of_several = ("sequences", "sequences_per_sample") if "sequences" in counts else ()
        if not all(_is_count(counts.get(name)) for name in ("samples", "tokens", *of_several)):
            return f"splits.{split}"
        if not isinstance(classes := counts.get("class_counts"), list) or not all(map(_is_count, classes)):
            return f"splits.{split}.class_counts"
    for name, file in header["files"].items():
        known = isinstance(file, dict) and _is_count(file.get("bytes")) and isinstance(file.get("sha256"), str)
        if not known or Path(name).name != name:
            return f"files.{name}"
    return None


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**62
