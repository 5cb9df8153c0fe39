"""The study of a search: what is searched and what became of each trial, kept by Optuna in FOLDER/study.log.

The file is Optuna's journal, which its own tools read too, written whole and under a lock that ends with its process.
Optuna's `JournalFileBackend` (5.0) waits at least 30 seconds for the lock of a killed process; it opens no file to
which it added lines after the half line that a full disk left.
"""

import json
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from nystrom.json_files import parse_json
from nystrom.whole_files import check_no_link, write_whole

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import FrozenTrial

# The file of a study, the folder of its trials, and the job that ends it.
STUDY, TRIALS, SEARCH = "study.log", "trials", "search"


class _Journal:
    """A journal as Optuna's storages use it: an object a line."""

    def __init__(self, file: Path):
        self.file = file

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:
        lines = self.file.read_bytes().splitlines() if self.file.is_file() else []
        for number, line in enumerate(lines[log_number_from:], log_number_from + 1):
            log: Any = None
            with suppress(ValueError):
                log = parse_json(line)
            if log is None or not {"op_code", "worker_id"} <= log.keys():
                raise ValueError(
                    f"{self.file} is damaged in line {number}, or not of a search: choose another folder with --to."
                )
            yield log

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        check_no_link(self.file)
        with FileLock(self.file.with_name(f".{self.file.name}.lock")):
            before = self.file.read_bytes() if self.file.is_file() else b""
            write_whole(self.file, before + "".join(json.dumps(log) + "\n" for log in logs).encode())


def open_study(folder: Path) -> "Study":
    """The study in a folder, which is created if there is none; one that is there is only read.

    Raises:
        ValueError: Optuna is not installed, or the file is damaged.
    """
    if find_spec("optuna") is None:
        raise ValueError("a search needs Optuna, which is not installed: pip install 'nystrom-lab[search]'.")
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    file = folder / STUDY
    try:
        storage = optuna.storages.JournalStorage(_Journal(file))  # pyright: ignore[reportArgumentType]
        if file.is_file():
            # `create_study` would add a line each time, for `nystrom lra status` too.
            return optuna.load_study(study_name=SEARCH, storage=storage)
        return optuna.create_study(storage=storage, study_name=SEARCH, direction="maximize", load_if_exists=True)
    except (AssertionError, KeyError, TypeError) as error:
        # Optuna's, for lines that lack something, and for another study.
        raise ValueError(f"{file} is damaged, or not of a search ({error!r}): choose another folder.") from error


def ended_trials(study: "Study", since: int = 0) -> "dict[str, FrozenTrial]":
    """The last outcome of each trial, by the name of its folder.

    Args:
        since: Number of outcomes before which those without a score do not count: such a trial is tried again.
    """
    trials = study.get_trials(deepcopy=False)
    return {each.user_attrs["name"]: each for each in trials if each.values or each.number >= since}


def outcome(trial: "FrozenTrial") -> str:
    """How a trial ended, in words."""
    facts = trial.user_attrs
    if trial.value is None:
        return facts["error"]
    return f"validation {facts['metric']} {trial.value:.4f} after step {facts['step']}, {facts['seconds']:.0f} s"
