"""The trials of a search, one run per combination of values, and their folder."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from nystrom.whole_files import check_folder, write_whole
from nystrom_lab.training.finetune.classifier import StartClassifier
from nystrom_lab.training.finetune.finetune_model import run_once, settle
from nystrom_lab.training.finetune.finetune_settings import FinetuneSettings
from nystrom_lab.training.finetune.request import Material, Request
from nystrom_lab.training.outcome import TRIALS, Outcome, forget_outcome, outcome_of
from nystrom_lab.training.run.folder import RunFolder
from nystrom_lab.training.run.run_trainer import NotFinite


@dataclass(frozen=True)
class Trial:
    """A combination of the values.

    Attributes:
        values: The values.
        settings: The settings with them.
        run: The folder.
    """

    values: Mapping[str, float]
    settings: FinetuneSettings
    run: RunFolder

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.values.items())

    def train(self, start: StartClassifier, material: Material) -> Outcome:
        """Train it without evaluating it, unless already done; non-finite numbers also count as an outcome.

        Raises:
            ValueError: Another process is training it.
            OSError: A file could not be written.
        """
        if (known := outcome_of(self.run)) is not None:
            return known
        metric, resume = material.task.metrics[0], self.run.is_started
        with self.run.held(self.settings, resume=resume, main=True):
            try:
                trainer = run_once(start, material, self.settings, self.run, resume=resume, score=False)
            except NotFinite as error:
                outcome = Outcome(metric=metric, error=str(error))
            else:
                value, step = trainer.state.best_metric, trainer.state.best_global_step
                assert value is not None, "the last step is evaluated"
                outcome = Outcome(metric=metric, value=value, step=step, seconds=trainer.seconds)
            outcome.write(self.run)
        return outcome

    def is_done(self) -> bool:
        """Whether it has an outcome."""
        return outcome_of(self.run) is not None

    def drop_checkpoints(self) -> None:
        """Remove its checkpoints, as it is not the best."""
        self.run.remove_checkpoints()


def plan_trials(request: Request, start: StartClassifier, material: Material) -> list[Trial]:
    """The trials of a search, in the order of its values.

    Raises:
        ValueError: Values that cannot be used.
    """
    assert request.grid is not None
    folder, trials = request.folder / TRIALS, []
    for values in request.grid.trials():
        name = "_".join(f"{key}-{value}" for key, value in values.items())
        trials.append(Trial(values, settle(start, material, request.asked.changed(values)), RunFolder(folder / name)))
    return trials


@contextmanager
def held(
    folder: Path, trials: Sequence[Trial], material: Material, *, resume: bool, seconds: float = 0.0
) -> Iterator[None]:
    """Lock the folder of a search that is new or continued.

    Args:
        folder: The folder.
        trials: The trials.
        material: The texts.
        resume: Continue the search in it.
        seconds: How long to wait for another process that has locked it.

    Raises:
        ValueError: It is in use, or holds something else or another search.
    """
    check_folder(folder)
    try:
        with FileLock(folder / ".lock", timeout=seconds):
            check_same(folder, trials, material, resume=resume)
            yield
    except Timeout:
        raise ValueError(f"{folder} is in use by another search: wait for it, or choose another folder.") from None


def check_same(folder: Path, trials: Sequence[Trial], material: Material, *, resume: bool) -> None:
    """Check that a folder is new, or holds this search, which is to continue.

    Raises:
        ValueError: It holds something else or another search.
    """
    path = folder / "search.json"
    content = {"data": material.data.fingerprint(), "trials": [asdict(trial.settings) for trial in trials]}
    if not path.is_file():
        if strange := [entry.name for entry in folder.iterdir() if entry.name != ".lock"]:
            raise ValueError(f"{folder} holds {strange[0]} and no search: choose another folder with --to.")
        if resume:
            raise ValueError(f"{folder} holds no search to resume: leave --resume out, or name its folder with --to.")
        write_whole(path, json.dumps(content, indent=1) + "\n")
    elif not resume:
        raise ValueError(f"{folder} holds a search: continue it with --resume, or choose another folder with --to.")
    elif json.loads(path.read_text(encoding="utf-8")) != json.loads(json.dumps(content)):
        raise ValueError(f"{folder} holds a search of other values, settings or data: choose another folder with --to.")


def forget_failures(trials: Sequence[Trial]) -> None:
    """Allow trials with non-finite numbers to be tried again."""
    for trial in trials:
        if (outcome := outcome_of(trial.run)) is not None and outcome.error:
            forget_outcome(trial.run)
