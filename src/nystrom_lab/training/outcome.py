"""What came of a run that is a trial of a search; its folder keeps it in outcome.json."""

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
        metric: What the trials are compared by.
        value: The best on validation; None where the numbers were not finite.
        step: After which it was reached.
        seconds: Of training.
        error: Why the numbers were not finite; "" where they were.
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
        """Keep it in the folder of the run."""
        write_whole(run.path / _FILE, json.dumps(asdict(self)) + "\n")


def outcome_of(run: RunFolder) -> Outcome | None:
    """The outcome of a trial; None where it has not ended, or is no trial.

    Raises:
        ValueError: Its file is damaged.
    """
    file = run.path / _FILE
    if not file.is_file():
        return None
    try:
        return Outcome(**json.loads(file.read_text(encoding="utf-8")))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file} is damaged ({error}): delete it, and the trial goes on.") from error


def forget_outcome(run: RunFolder) -> None:
    """Let a trial be tried again."""
    (run.path / _FILE).unlink(missing_ok=True)
