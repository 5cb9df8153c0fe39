"""What a finished run leaves: its curves, the best model, and rows of its results on validation and test."""

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from nystrom.models import EncoderConfig, EncoderModel
from nystrom.parallel import parallelize
from nystrom.sums import write_sums
from nystrom.whole_folders import whole_folder
from nystrom_lab.measure.rows import Row
from nystrom_lab.report.plots.curves import draw_curves
from nystrom_lab.training.data.tasks import Model, Splits, class_names, find_task
from nystrom_lab.training.results import Place, accuracy_row, result_row, setting_facts
from nystrom_lab.training.run.folder import RunFolder
from nystrom_lab.training.run.masked_trainer import ACCURACY, LOSS, MaskedTrainer
from nystrom_lab.training.run.trainer import EncoderTrainer
from nystrom_lab.training.run.weight_mean import load_mean
from nystrom_lab.training.run.writing import written
from nystrom_lab.training.run_settings import Settings
from nystrom_lab.training.scoring import accuracy, load_model


class Costs(NamedTuple):
    """What a training took before anything was scored, and which of its steps is kept.

    Attributes:
        seconds: Of training, evaluations and checkpoints included.
        best_step: The kept step.
        steps: Steps.
        megabytes: Peak memory; 0 where it is not known.
    """

    seconds: float
    best_step: int
    steps: int
    megabytes: float

    def rows(self, config: EncoderConfig, place: Place) -> list[Row]:
        """A row of each that is known."""
        measured = (
            ("training time", self.seconds, "s"),
            ("best step", self.best_step, ""),
            ("steps", self.steps, ""),
            ("peak memory", self.megabytes, "MB"),
        )
        return [result_row(config, quantity, value, unit, place) for quantity, value, unit in measured if value]


def finish(trainer: EncoderTrainer, settings: Settings, run: RunFolder, *, command: str) -> None:
    """Write curves, the best model and, last, the results, and print them.

    Args:
        trainer: After its last step.
        settings: Settings of the run.
        run: The folder.
        command: The command that reproduces the run alone.

    Raises:
        OSError: A file could not be written; the message names it and how to continue.
    """
    state, costs = trainer.state, _costs(trainer)
    _write_curves(trainer, run)
    assert state.best_global_step, "the last step is evaluated, and counts"
    assert state.best_metric is not None
    test, val = trainer.splits.test, trainer.splits.val
    assert test is not None, "a run that classifies opens the test split"
    best, share = score_best(trainer, settings, run)
    with written(run.best, "go on with --resume"):
        _save(best, run.best)
    place, guesses = _place(settings, command), _guesses(settings.task, trainer.splits)
    rows = [
        accuracy_row(best.config, "test accuracy", share, len(test), place),
        accuracy_row(best.config, "validation accuracy", state.best_metric, len(val), place),
        *(result_row(best.config, f"{name} of test", told, "", place) for name, told in guesses.items()),
        *costs.rows(best.config, place),
    ]
    with written(run.rows, "go on with --resume"):
        run.write_rows(rows)
    beside = ", ".join(f"{name} {told:.1%}" for name, told in guesses.items())
    print(
        f"test accuracy {share:.1%} ({rows[0].low:.1%} to {rows[0].high:.1%} on {len(test)} samples), {beside}; best "
        f"after step {state.best_global_step} with validation accuracy {state.best_metric:.1%}; "
        f"{costs.seconds:.0f} s of training\n"
        f"model  {run.best}\ncurves {run.curves}, {run.plot}\nrows   {run.rows}"
    )


def _guesses(task: str, splits: Splits) -> dict[str, float]:
    """Accuracies on the test split of guesses that need no model."""
    assert splits.test is not None, "a run that classifies opens the test split"
    known = {"largest class": splits.test.majority_share}
    guess = find_task(task).guess
    return known if guess is None else known | {guess.name: guess.share(splits.train, splits.test)}


def score_best(trainer: EncoderTrainer, settings: Settings, run: RunFolder) -> tuple[Model, float]:
    """The best model, and its accuracy on the test split; the ranks that share samples score together.

    Args:
        trainer: After its last step.
        settings: Settings of the run.
        run: The folder.
    """
    task, test, step = find_task(settings.task), trainer.splits.test, trainer.state.best_global_step
    assert step, "the last step is evaluated, and counts"
    assert test is not None, "a run that classifies opens the test split"
    best = load_model(run.checkpoint(step), settings.task, classes=class_names(test))
    if settings.ema:
        load_mean(best, run.checkpoint(step))
    if trainer.pieces is not None:
        parallelize(best, trainer.pieces.tokens)
        task = replace(task, collate=trainer.pieces.collate(task.collate))
    share = accuracy(
        best, test, task, batch_size=settings.part_size, device=settings.device, precision=settings.precision
    )
    return best, share


def finish_masked(trainer: MaskedTrainer, settings: Settings, run: RunFolder, *, command: str) -> None:
    """Write curves, the best encoder and, last, the results of a run on masked tokens, and print them; see `finish`."""
    state, costs = trainer.state, _costs(trainer)
    _write_curves(trainer, run)
    step = state.best_global_step
    assert step, "the last step is evaluated"
    best = EncoderModel.from_pretrained(run.checkpoint(step))
    if settings.ema:
        load_mean(best, run.checkpoint(step))
    with written(run.best, "go on with --resume"):
        _save(best, run.best)
    [logged] = [entry for entry in state.log_history if entry["step"] == step and "eval_loss" in entry][-1:]
    place, val = _place(settings, command), trainer.splits.val
    accuracy, loss = logged["eval_accuracy"], logged["eval_loss"]
    rows = [
        result_row(best.config, ACCURACY, accuracy, "", place, repeats=len(val)),
        result_row(best.config, LOSS, loss, "", place, repeats=len(val)),
        *costs.rows(best.config, place),
    ]
    rows = [replace(row, study=f"pretrain {settings.task}") for row in rows]
    with written(run.rows, "go on with --resume"):
        run.write_rows(rows)
    print(
        f"of the masked tokens of {len(val)} validation samples {accuracy:.1%} are predicted, loss {loss:.4g}; best "
        f"after step {step}; {costs.seconds:.0f} s of training\n"
        f"model  {run.best}\ncurves {run.curves}, {run.plot}\nrows   {run.rows}"
    )


def _write_curves(trainer: EncoderTrainer, run: RunFolder) -> None:
    with written(run.path, "go on with --resume"):
        run.write_curves(trainer.curves())
        draw_curves(run.curves, run.plot)


def _place(settings: Settings, command: str) -> Place:
    return Place(settings.device, settings.precision, settings.seed, setting_facts(settings), command)


def _costs(trainer: EncoderTrainer) -> Costs:
    return Costs(trainer.seconds, trainer.state.best_global_step or 0, trainer.settings.steps, trainer.megabytes)


def _save(model: Model | EncoderModel, folder: Path) -> None:
    """Save a model in the place of the one before."""
    with whole_folder(folder) as partial:
        model.save_pretrained(partial)
        write_sums(partial)
