"""The record of a search, FOLDER/search.json, and how each trial ended, outcome.json in the folder of its run."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from nystrom.json_files import read_json
from nystrom.whole_files import write_whole
from nystrom_lab.training.run_folder import RunFolder

RECORD, OUTCOME = "search.json", "outcome.json"
# The folder of the trials, and the job that evaluates the best of them.
TRIALS, SEARCH = "trials", "search"
_OTHER = "choose another folder with --to"


class Outcome(NamedTuple):
    """How a trial ended.

    Attributes:
        metric: The metric by which trials are compared.
        value: The best value on validation; None if the numbers were not finite.
        step: The step after which it was reached.
        seconds: Seconds of training.
        error: Why there is no value.
    """

    metric: str
    value: float | None = None
    step: int | None = None
    seconds: float = 0.0
    error: str = ""

    def __str__(self) -> str:
        if self.value is None:
            return self.error
        return f"validation {self.metric} {self.value:.4f} after step {self.step}, {self.seconds:.0f} s"

    def write(self, run: RunFolder) -> None:
        """Write it into the folder of the run."""
        write_whole(run.path / OUTCOME, json.dumps(self._asdict()) + "\n")


def outcome_of(run: RunFolder) -> Outcome | None:
    """The outcome of a trial; None if the run has not ended, or is no trial.

    Raises:
        ValueError: The file of the outcome is damaged.
    """
    file, remedy = run.path / OUTCOME, "delete it, and the same command continues the trial"
    if not file.is_file():
        return None
    content = read_json(file, remedy=remedy)
    numbers = (content.get("value"), content.get("step"), content.get("seconds"))
    if content.keys() != set(Outcome._fields) or not all(isinstance(each, int | float | None) for each in numbers):
        raise ValueError(f"{file} does not say how a trial ended: {remedy}.")
    return Outcome(**content)


def read_search(folder: Path) -> dict[str, Any] | None:
    """The data and the settings of each trial of the search in a folder; None if there is no search.

    Raises:
        ValueError: The file is damaged, or the search is one that Optuna kept.
    """
    if (folder / "study.log").is_file():
        raise ValueError(
            f"{folder} holds study.log, a search that an earlier version kept with Optuna: finish it with that "
            f"version, or {_OTHER}."
        )
    file = folder / RECORD
    if not file.is_file():
        return None
    content = read_json(file, remedy=_OTHER)
    trials = content.get("trials")
    if "data" not in content or not isinstance(trials, list) or not all(isinstance(each, dict) for each in trials):
        raise ValueError(f"{file} does not describe a search of this library: {_OTHER}.")
    return content
