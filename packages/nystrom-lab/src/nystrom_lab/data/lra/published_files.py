"""The three files of a task of the Long Range Arena's release, in their folder or one of those around it."""

from collections.abc import Mapping, Sequence
from pathlib import Path

AROUND = ("", "lra_release", "lra_release/lra_release")


def published_files(
    source: Path, names: Mapping[str, str], *, folder: str, endings: Sequence[str] = ("",)
) -> dict[str, Path]:
    """Find the files of a task; empty if there is none of them.

    Args:
        source: The folder of the files, or the release around it.
        names: The file of each split.
        folder: Their folder in the release.
        endings: What may stand behind a name, such as that of a compressed file.

    Raises:
        ValueError: Some are missing, or the source is one of them.
    """
    if source.is_file() and source.name in names.values():
        raise ValueError(f"{source} is one of three official files: name their folder, {source.parent}.")
    for place in (source, *(source / around / folder for around in AROUND)):
        found = {
            split: path
            for split, name in names.items()
            for path in (place / (name + ending) for ending in endings)
            if path.is_file()
        }
        if missing := [name for split, name in names.items() if found and split not in found]:
            raise ValueError(f"{place} lacks {', '.join(missing)}: all three official files are needed.")
        if found:
            return found
    return {}
