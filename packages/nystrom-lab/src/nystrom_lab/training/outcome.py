"""The outcome of a trial of a search, stored in its folder as outcome.json."""

import json
from dataclasses import asdict, dataclass

from nystrom.whole_files import write_whole
from nystrom_lab.training.run.folder import RunFolder

# The folder of the trials in that of a search, and the job that ends it.
TRIALS, SEARCH = "trials", "search"
_FILE = "outcome.json"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a trial ended.

    Attributes:
        metric: The metric by which trials are compared.
        value: The best value on validation; None if the numbers were not finite.
        step: The step after which it was reached.
        seconds: Seconds of training.
        error: Why the numbers were not finite; "" if they were.
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
        """Save it in the folder of the run."""
        write_whole(run.path / _FILE, json.dumps(asdict(self)) + "\n")


def outcome_of(run: RunFolder) -> Outcome | None:
    """The outcome of a trial; None if it has not ended, or is not a trial.

    Raises:
        ValueError: Its file is damaged.
    """
    file = run.path / _FILE
    if not file.is_file():
        return None
    try:
        return Outcome(**json.loads(file.read_text(encoding="utf-8")))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file} is damaged ({error}): delete it to continue the trial.") from error


def forget_outcome(run: RunFolder) -> None:
    """Remove the outcome of a trial, so that it is tried again."""
    (run.path / _FILE).unlink(missing_ok=True)
