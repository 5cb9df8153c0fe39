"""The files of a finished run: curves, the best model, the cost of training, and last the rows."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from nystrom.models.files.folder import write_card
from nystrom.sums import find_fault
from nystrom.whole_folders import whole_folder
from nystrom_lab.measure.rows import Row
from nystrom_lab.report.plots.curves import draw_curves
from nystrom_lab.training.hardware import is_main
from nystrom_lab.training.run.folder import RunFolder
from nystrom_lab.training.run.run_trainer import RunTrainer
from nystrom_lab.training.run.writing import written

_REMEDY = "continue with --resume"


def is_done(run: RunFolder, *, resume: bool) -> bool:
    """Whether a run that is resumed is finished; says so, and its files stay as they are."""
    if not resume or not run.is_finished:
        return False
    if is_main():
        fault = find_fault(run.best)
        print(
            f"{run.path} is finished: nothing is left to train, and its files stay as they are.\n"
            f"model  {run.best}{f' ({fault}; to write it again, move it and {run.rows.name} away)' if fault else ''}\n"
            f"rows   {run.rows}",
            flush=True,
        )
    return True


def write_curves(trainer: RunTrainer, run: RunFolder) -> int:
    """Write and plot the curves of a training, and return its best step.

    Raises:
        OSError: A file could not be written; the message, as in all functions here, names it and how to continue.
    """
    with written(run.path, _REMEDY):
        run.write_curves(trainer.curves())
        draw_curves(run.curves, run.plot)
    best = trainer.state.best_global_step
    assert best, "the last step is evaluated, and counts"
    return best


@contextmanager
def best_folder(run: RunFolder) -> Iterator[Path]:
    """A folder to save the best model in; when complete, it replaces the previous one."""
    with written(run.best, _REMEDY), whole_folder(run.best) as partial:
        yield partial
        write_card(partial)


def costs(trainer: RunTrainer, *, steps: int) -> list[tuple[str, float, str]]:
    """The cost of a training before evaluation, and the step that is kept: quantity, value and unit."""
    measured = (
        ("training time", trainer.seconds, "s"),
        ("best step", trainer.state.best_global_step or 0, ""),
        ("steps", steps, ""),
        ("peak memory", trainer.megabytes, "MB"),
    )
    # Memory is 0 where it is not known.
    return [each for each in measured if each[1]]


def write_rows(run: RunFolder, rows: Iterable[Row]) -> None:
    """Write the results; with them the run is finished."""
    with written(run.rows, _REMEDY):
        run.write_rows(list(rows))
