"""One run is one folder.

    run.json        the settings of the run, its data and the versions that it started with
    checkpoint-N/   what resuming needs, after step N: the last two, and the best
    curves.csv      step, quantity, value, seconds of training until then; curves.png the same, drawn
    best/           the best model in Hugging Face format, chosen on the validation split
    rows.csv        results, as rows of `nystrom.measure.rows`

A checkpoint is complete once its file `complete.json` lists the sizes of all others: one that was cut off while it was
written, or after, is passed over and then removed. Files that are replaced are written beside their place and renamed.
"""

import csv
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from nystrom.measure.rows import Row, append_rows, check_folder
from nystrom.train.settings import Settings, differences

_SETTINGS, _COMPLETE = "run.json", "complete.json"
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")


class Point(NamedTuple):
    """A point of a curve; `seconds` are those of training until then."""

    step: int
    quantity: str
    value: float
    seconds: float


class RunFolder:
    """The folder of one run.

    Args:
        path: Where it is, or will be.
    """

    def __init__(self, path: Path):
        self.path = path
        self.curves, self.plot = path / "curves.csv", path / "curves.png"
        self.best, self.rows = path / "best", path / "rows.csv"

    def check(self, settings: Settings, *, resume: bool, main: bool) -> None:
        """See that a run with these settings may start, or go on, here; the main process makes the folder.

        Raises:
            ValueError: The folder cannot be written, holds a run that is not to be resumed or has other settings, or
                holds something else.
        """
        if main:
            check_folder(self.path)
        if not (self.path / _SETTINGS).is_file():
            # A run that was killed before its first file was whole leaves that file's beginning.
            if main and any(not entry.name.endswith(".partial") for entry in self.path.iterdir()):
                raise ValueError(f"{self.path} is not empty and holds no run: take another folder with --to.")
            if resume:
                raise ValueError(
                    f"{self.path} holds no run to resume: leave --resume out, or name its folder with --to."
                )
            return
        if not resume:
            raise ValueError(f"{self.path} holds a run: go on with it by --resume, or take another folder with --to.")
        if different := differences(settings, self.read()["settings"]):
            raise ValueError(
                f"{self.path} holds a run with other settings: {'; '.join(different)}. Resume with the settings and "
                "the data of the run, or start another with --to."
            )

    def check_data(self, fingerprint: str) -> None:
        """See that a run that goes on has its old data.

        Raises:
            ValueError: They differ.
        """
        if (self.path / _SETTINGS).is_file() and (before := self.read()["data"])["fingerprint"] != fingerprint:
            raise ValueError(
                f"{self.path} holds a run on {before['folder']}, whose data were others (fingerprint "
                f"{before['fingerprint']}, now {fingerprint}): name the folder of those with --data."
            )

    def data_folder(self) -> Path | None:
        """Where the data of the run lie; None where there is no run yet."""
        return Path(self.read()["data"]["folder"]) if (self.path / _SETTINGS).is_file() else None

    def read(self) -> dict[str, Any]:
        """What run.json says.

        Raises:
            ValueError: It says nothing that can be read.
        """
        path = self.path / _SETTINGS
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is no JSON text ({error}): take another folder with --to.") from error
        if not isinstance(content, dict) or not {"settings", "data"} <= content.keys():
            raise ValueError(f"{path} is not of a run of this library: take another folder with --to.")
        return content

    def start(self, settings: Settings, data: Mapping[str, object], versions: Mapping[str, str]) -> None:
        """Write run.json, unless the run goes on."""
        if not (self.path / _SETTINGS).is_file():
            content = {"settings": asdict(settings), "data": dict(data), "versions": dict(versions)}
            self._replace(self.path / _SETTINGS, json.dumps(content, indent=1) + "\n")

    def checkpoint(self, step: int) -> Path:
        """Where the checkpoint after a step lies."""
        return self.path / f"checkpoint-{step}"

    def last_step(self) -> int | None:
        """The step of the last complete checkpoint; None where there is none."""
        return max((step for step in self._steps() if self._is_complete(step)), default=None)

    def mark_complete(self, step: int) -> None:
        """Say that all files of a checkpoint are written."""
        folder = self.checkpoint(step)
        sizes = {file.name: file.stat().st_size for file in sorted(folder.iterdir()) if file.name != _COMPLETE}
        self._replace(folder / _COMPLETE, json.dumps(sizes, indent=1) + "\n")

    def prune(self, *, best: int | None) -> None:
        """Remove all checkpoints but the last two and the best."""
        for step in sorted(self._steps())[:-2]:
            if step != best:
                shutil.rmtree(self.checkpoint(step))

    def remove_after(self, step: int | None) -> None:
        """Remove checkpoints that were not completed, and what came after the step that a run goes on from."""
        for other in self._steps():
            if step is None or other > step or not self._is_complete(other):
                shutil.rmtree(self.checkpoint(other))

    def write_curves(self, points: Iterable[Point]) -> None:
        """Replace the curves."""
        path = self.curves.with_suffix(".partial")
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(Point._fields)
            writer.writerows(
                (step, quantity, repr(value), f"{seconds:.3f}") for step, quantity, value, seconds in points
            )
        os.replace(path, self.curves)

    def write_rows(self, rows: Iterable[Row]) -> None:
        """Replace the results."""
        path = self.rows.with_suffix(".partial")
        path.unlink(missing_ok=True)
        append_rows(path, rows)
        os.replace(path, self.rows)

    def _steps(self) -> list[int]:
        matches = (_CHECKPOINT.fullmatch(entry.name) for entry in self.path.iterdir() if entry.is_dir())
        return [int(match[1]) for match in matches if match]

    def _is_complete(self, step: int) -> bool:
        folder = self.checkpoint(step)
        try:
            sizes = json.loads((folder / _COMPLETE).read_text(encoding="utf-8"))
            return bool(sizes) and all((folder / name).stat().st_size == size for name, size in sizes.items())
        except (OSError, ValueError):
            return False

    @property
    def is_started(self) -> bool:
        """Whether there is a run."""
        return (self.path / _SETTINGS).is_file()

    @property
    def is_finished(self) -> bool:
        """Whether the run has come to its end: its results are what is written last."""
        return self.rows.is_file()

    @staticmethod
    def _replace(path: Path, text: str) -> None:
        partial = path.with_name(f".{path.name}.partial")
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
