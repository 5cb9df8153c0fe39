"""One run is one folder.

    run.json        the settings of the run, its data and the versions that it started with
    checkpoint-N/   what is needed to resume after step N: the last two, and the best
    curves.csv      step, quantity, value, seconds of training until then; curves.png is their plot
    best/           the best model in Hugging Face format, chosen on the validation split, with its own `complete.json`
    rows.csv        results, as rows of `nystrom_lab.measure.rows`
    .lock           held by the process that trains

A checkpoint is written into `.checkpoint.partial/`, and gets its name when its `complete.json` lists the sizes and
checksums of all its files, a copy of run.json among them. One that is damaged, of other settings or data, or under the
name of another step is skipped, and so is one whose best checkpoint has lost its weights. Settings and data are
compared, so run.json may be indented in another way, and the data may move. A run removes only its own older
checkpoints, file by file; what it skips stays, under another name once the run writes that checkpoint again.

transformers' `save_total_limit` and `get_last_checkpoint` do less: they remove an old checkpoint before the new one is
known to be complete, lose the best one when the folder is moved, and accept a half-written checkpoint as the last.
"""

import csv
import hashlib
import importlib.metadata
import json
import platform
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from nystrom import __version__
from nystrom.attention.method_names import sized_name
from nystrom.json_files import parse_json, read_json
from nystrom.sums import find_fault, read_sums
from nystrom.whole_files import NotWritten, check_folder, check_no_link, whole_file, write_whole
from nystrom_lab.config import Resolved
from nystrom_lab.measure.rows import Row, write_rows
from nystrom_lab.training.hardware import is_main, restarts
from nystrom_lab.whole_folders import put_in_place, remove_recorded, write_sums

_LOCK = ".lock"
_CHECKPOINT = re.compile(r"checkpoint-([1-9][0-9]*)")


class Point(NamedTuple):
    """A point of a curve; `seconds` counts the training until then."""

    step: int
    quantity: str
    value: float
    seconds: float


class RunFolder:
    """The folder of one run.

    Args:
        path: Path of the folder; it need not exist yet.
    """

    def __init__(self, path: Path):
        self.path = path = Path(path).expanduser()
        self.curves, self.plot = path / "curves.csv", path / "curves.png"
        self.best, self.rows = path / "best", path / "rows.csv"

    @contextmanager
    def held(self, settings: Resolved, *, resume: bool, main: bool) -> Iterator[None]:
        """Lock the folder for a run with these settings, which may start or continue here.

        The lock ends with the process, however it ends. If no run has started by the end, a newly created folder is
        removed.

        Args:
            main: Whether this is the process that writes; for other processes this does nothing.

        Raises:
            ValueError: The folder cannot be written, is in use, holds a run although `resume` is not set, holds a run
                with other settings, or holds something else.
        """
        if not main:
            yield
            return
        made = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        check_folder(self.path)
        new = not (self.path / _LOCK).exists()
        lock = FileLock(self.path / _LOCK, timeout=0)
        try:
            lock.acquire()
        except Timeout:
            raise ValueError(
                f"{self.path} is in use by another training: wait for it, or choose another folder with --to."
            ) from None
        try:
            self.check_free(resume=resume)
            if self.is_started:
                self.check_settings(settings)
            yield
        finally:
            if new and not self.is_started:
                (self.path / _LOCK).unlink(missing_ok=True)
            lock.release()
            with suppress(OSError):
                # A folder that is not empty stays.
                for folder in made:
                    folder.rmdir()

    def is_resumed(self, resume: bool) -> bool:
        """Whether to continue a run: as requested, or because torchrun restarted its processes."""
        return resume or (restarts() > 0 and self.is_started)

    def wait(self, seconds: float) -> None:
        """Wait until no other process has locked the folder.

        Raises:
            ValueError: It is still locked after `seconds`.
        """
        if (self.path / _LOCK).is_file():
            try:
                with FileLock(self.path / _LOCK, timeout=seconds):
                    pass
            except Timeout:
                raise ValueError(f"{self.path} is in use by another training after {seconds:g} s of waiting.") from None

    def check_free(self, *, resume: bool) -> None:
        """Check that a run can start here, or that one is there to continue; before any work, and again once locked.

        Raises:
            ValueError: There is a run although `resume` is not set, or none although it is, or something else.
        """
        if self.is_started:
            if not resume:
                raise ValueError(
                    f"{self.path} holds a run: continue it with --resume, or choose another folder with --to."
                )
            return
        # A run that was killed while writing its first file leaves the beginning of that file.
        there = self.path.iterdir() if self.path.is_dir() else ()
        if any(entry.name != _LOCK and not entry.name.endswith(".partial") for entry in there):
            raise ValueError(f"{self.path} is not empty and holds no run: choose another folder with --to.")
        if resume:
            raise ValueError(f"{self.path} holds no run to resume: leave --resume out, or name its folder with --to.")

    def check_settings(self, settings: Resolved) -> None:
        """Check that a resumed run has its original settings.

        Raises:
            ValueError: They differ.
        """
        if different := settings.differences(self.read()["settings"]):
            raise ValueError(
                f"{self.path} holds a run with other settings: {'; '.join(different)}. Resume with the settings and "
                "the data of the run, or start another with --to."
            )

    def check_data(self, fingerprint: str) -> None:
        """Check that a resumed run has its original data.

        Raises:
            ValueError: They differ.
        """
        # An older run has the first of the two parts alone.
        known = (fingerprint, fingerprint.partition("-")[0])
        if self.is_started and (before := self.read()["data"])["fingerprint"] not in known:
            raise ValueError(
                f"{self.path} holds a run on {before['folder']}, whose data were different (fingerprint "
                f"{before['fingerprint']}, now {fingerprint}): name the original folder with --data. An earlier "
                "version may have held out other texts: then start another run with --to."
            )

    def data_folder(self) -> Path | None:
        """The data folder of the run; None if no run has started."""
        return Path(self.read()["data"]["folder"]) if self.is_started else None

    def read(self) -> dict[str, Any]:
        """The content of run.json.

        Raises:
            ValueError: It cannot be read.
        """
        path = self.path / SETTINGS
        content = read_json(path, remedy="choose another folder with --to")
        settings, data = (content.get(name) for name in ("settings", "data"))
        named = isinstance(data, dict) and all(isinstance(data.get(name), str) for name in ("folder", "fingerprint"))
        if not named or not isinstance(settings, dict):
            raise ValueError(f"{path} does not describe a run of this library: choose another folder with --to.")
        return content

    def start(self, settings: Resolved, *, folder: str, fingerprint: str) -> None:
        """Write run.json, unless the run is resumed."""
        if not self.is_started:
            method, _ = sized_name(settings.attention, settings.options)
            content = {
                "method": method,
                "settings": settings.record(),
                "data": {"folder": folder, "fingerprint": fingerprint},
                "versions": versions(),
            }
            write_whole(self.path / SETTINGS, json.dumps(content, indent=1) + "\n")

    def is_done(self, *, resume: bool) -> bool:
        """Whether a run that is resumed is finished; says so, and its files stay as they are.

        Raises:
            ValueError: The run's model is damaged.
        """
        if not resume or not self.is_finished:
            return False
        self.check_best()
        if is_main():
            print(
                f"{self.path} is finished: nothing is left to train, and its files stay as they are.\n"
                f"model  {self.best}\n"
                f"rows   {self.rows}",
                flush=True,
            )
        return True

    def check_best(self) -> None:
        """Raise ValueError if the model of the finished run is not as it was written."""
        if fault := find_fault(self.best):
            raise ValueError(
                f"{self.path} is finished, but model {self.best}: {fault}. Restore it from a copy; or move it and "
                f"{self.rows.name} away, and --resume writes both again from the best checkpoint."
            )

    @property
    def drawn(self) -> dict[str, object]:
        """The curves and their plot, for a list of files."""
        return {"curves": f"{self.curves}, {self.plot}"}

    def checkpoint(self, step: int) -> Path:
        """The folder of the checkpoint after a step."""
        return self.path / f"checkpoint-{step}"

    def last_step(self) -> int | None:
        """The step of the last checkpoint that a run can continue from; None if there is none."""
        return max((step for step in self._steps() if not self._faults(step)), default=None)

    def damage(self) -> list[tuple[Path, str]]:
        """The checkpoints that a run cannot continue from, and why."""
        return [(self.checkpoint(step), fault) for step in sorted(self._steps()) if (fault := self._faults(step))]

    @property
    def unfinished(self) -> Path:
        """The folder in which checkpoints are written."""
        return self.path / ".checkpoint.partial"

    def clear_unfinished(self) -> None:
        """Remove the checkpoint that was being written when the run ended.

        Raises:
            ValueError: A link has the checkpoint's place.
        """
        check_no_link(self.unfinished)
        shutil.rmtree(self.unfinished, ignore_errors=True)

    def complete(self, step: int) -> None:
        """Give a checkpoint that is written its record and its name.

        Raises:
            OSError: A file cannot be written.
        """
        complete(self.unfinished / self.checkpoint(step).name, self.checkpoint(step))
        self.clear_unfinished()

    def prune(self, *, last: int, best: int | None) -> None:
        """Remove this run's checkpoints until a step, except the last two, the best, and what the two have as best."""
        steps = sorted(step for step in self._steps() if step <= last and not strangeness(self.checkpoint(step), step))
        needed = {best, *steps[-2:], *map(self._best_at, steps[-2:])}
        for step in steps:
            if step not in needed:
                remove_recorded(self.checkpoint(step))

    def remove_checkpoints(self) -> None:
        """Remove all checkpoints of this run."""
        for step in self._steps():
            if not strangeness(self.checkpoint(step), step):
                remove_recorded(self.checkpoint(step))

    def write_curves(self, points: Iterable[Point]) -> None:
        """Replace the curves."""
        with whole_file(self.curves) as partial, partial.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(Point._fields)
            writer.writerows(
                (step, quantity, repr(value), f"{seconds:.3f}") for step, quantity, value, seconds in points
            )

    def write_rows(self, rows: Iterable[Row]) -> None:
        """Replace the results."""
        write_rows(self.rows, rows)

    def _steps(self) -> list[int]:
        matches = (_CHECKPOINT.fullmatch(entry.name) for entry in self.path.iterdir() if entry.is_dir())
        return [int(match[1]) for match in matches if match]

    def _faults(self, step: int) -> str:
        """Why a run cannot continue from a checkpoint; "" if it can."""
        if fault := fault_of(self.checkpoint(step), step):
            return fault
        best = self._best_at(step)
        if best in (None, step) or not (fault := fault_of(self.checkpoint(best), best, weights=True)):
            return ""
        return f"the best checkpoint before it is lost ({self.checkpoint(best)}: {fault})"

    def _best_at(self, step: int) -> int | None:
        """The best step as recorded in the checkpoint of a step; None if it records none."""
        return state_of(self.checkpoint(step)).get("best_global_step")

    @property
    def is_started(self) -> bool:
        """Whether run.json exists."""
        return (self.path / SETTINGS).is_file()

    @property
    def is_finished(self) -> bool:
        """Whether the run is finished: its results are written last."""
        return self.rows.is_file()


@contextmanager
def written(path: Path, remedy: str) -> Iterator[None]:
    """Convert any failure to write a file to one kind of error; other errors are passed on.

    Args:
        remedy: The action for the user once the file can be written.

    Raises:
        NotWritten: The system, torch or safetensors could not write it.
    """
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        if not _is_of_a_file(error):
            raise
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error).splitlines()[0]
        name = error.filename if isinstance(error, NotWritten) and error.filename else path
        raise NotWritten(f"{name} cannot be written ({why}): make room for it, then {remedy}.") from error


def _is_of_a_file(error: Exception) -> bool:
    """Whether a file could not be written; if not, other ranks were lost, memory was short, or it is a bug."""
    if isinstance(error, OSError):
        return not isinstance(error, ConnectionError | TimeoutError)
    # safetensors quotes the system's error. torch names the file of its writer, or the folder that is missing.
    said = ("I/O error",) if isinstance(error, SafetensorError) else ("inline_container", "Parent directory")
    return any(word in str(error) for word in said)


def versions() -> dict[str, str]:
    """The versions of Python, of this library, installed or not, and of its training dependencies."""
    packages = ("torch", "transformers", "accelerate")
    mine = {"python": platform.python_version(), "nystrom": __version__}
    return mine | {name: importlib.metadata.version(name) for name in packages}


SETTINGS = "run.json"
_STATE = "trainer_state.json"
# Files that only a resumed run reads; the best checkpoint is used for its weights.
_FOR_TRAINING = (".pt", ".pth", ".bin", _STATE)


def complete(partial: Path, to: Path) -> None:
    """Record the files of a checkpoint that is written, and its run, and put it in its place in the run's folder.

    Raises:
        OSError: A file cannot be written.
    """
    run = to.parent / SETTINGS
    if run.is_file():
        write_whole(partial / SETTINGS, run.read_bytes())
    if state := state_of(partial):
        # A path, which is not the one that the checkpoint gets; the step is what counts.
        write_whole(partial / _STATE, json.dumps(state | {"best_model_checkpoint": None}, indent=2) + "\n")
    write_sums(partial)
    put_in_place(partial, to)


def state_of(checkpoint: Path) -> dict[str, Any]:
    """The trainer state in a checkpoint; empty if it cannot be read."""
    return _read(checkpoint / _STATE)


def fault_of(checkpoint: Path, step: int, *, weights: bool = False) -> str:
    """The fault of a checkpoint, or with its weights alone; "" if it is of its run, and unchanged."""
    return find_fault(checkpoint, besides=_FOR_TRAINING if weights else ()) or strangeness(checkpoint, step)


def strangeness(checkpoint: Path, step: int) -> str:
    """Why a checkpoint is none of the run around it after this step; "" if it is one. No checksum is compared."""
    try:
        written = read_sums(checkpoint)
    except FileNotFoundError:
        return "it has no record of its files"
    except ValueError as error:
        return str(error)
    if (saved := state_of(checkpoint).get("global_step", step)) != step:
        return f"it holds step {saved}"
    run = checkpoint.parent / SETTINGS
    if not run.is_file():
        return ""
    if entry := written.get(f"../{SETTINGS}"):
        # Version 0.3 stored the checksum of run.json with its own indentation.
        texts = (run.read_bytes(), (json.dumps(_read(run), indent=1) + "\n").encode())
        same = entry[1] in (None, *(hashlib.sha256(text).hexdigest() for text in texts))
        return "" if same else f"{run} is not the file that it was written with"
    (settings, data), (others, other) = _settings_and_data(checkpoint / SETTINGS), _settings_and_data(run)
    # A setting that one lacks had its default; all of the run's are compared with those of the command.
    differ = sorted(name for name in settings.keys() & others if settings[name] != others[name])
    differ += [] if None in (data, other) or data == other else ["data"]
    return f"it is of a run with other {', '.join(differ)}" if differ else ""


def _settings_and_data(run: Path) -> tuple[dict[str, Any], str | None]:
    settings, data = (part if isinstance(part := _read(run).get(name), dict) else {} for name in ("settings", "data"))
    # Earlier versions had the first of two parts alone.
    return settings, str(data["fingerprint"]).partition("-")[0] if "fingerprint" in data else None


def _read(file: Path) -> dict[str, Any]:
    """The content of a JSON file; empty if it cannot be read."""
    try:
        return parse_json(file.read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return {}


@contextmanager
def alone(to: Path, command: str, seconds: float = 0) -> Iterator[None]:
    """Lock the folder, so that two commands do not write the same runs or rows; the lock ends with the process.

    Args:
        to: The folder; created if missing.
        command: The command that works there, for the message.
        seconds: How long to wait for another one.

    Raises:
        ValueError: The folder holds one run, cannot be written, or another process has locked it.
    """
    if RunFolder(to).is_started:
        raise ValueError(f"{to} holds one run, where {command} has no place: choose another folder with --to.")
    check_folder(to)
    lock = FileLock(to / ".lock", timeout=seconds)
    try:
        lock.acquire()
    except Timeout:
        raise ValueError(f"{to} is in use by another {command}: wait for it, or choose another folder.") from None
    try:
        yield
    finally:
        lock.release()
