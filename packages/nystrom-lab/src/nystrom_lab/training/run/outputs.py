"""The results of a finished run: its curves, the best model, and rows of its validation and test results."""

from dataclasses import replace

from nystrom.models import EncoderModel
from nystrom.parallel import parallelize
from nystrom_lab.training.additions.weight_mean import load_mean
from nystrom_lab.training.data.tasks import Model, Splits, class_names, find_task
from nystrom_lab.training.results import Place, accuracy_row, result_row, setting_facts
from nystrom_lab.training.run.finished import best_folder, costs, write_curves, write_rows
from nystrom_lab.training.run.folder import RunFolder
from nystrom_lab.training.run.masked_trainer import ACCURACY, LOSS, MaskedTrainer
from nystrom_lab.training.run.trainer import EncoderTrainer
from nystrom_lab.training.run_settings import Settings
from nystrom_lab.training.scoring import accuracy, load_model


def finish(trainer: EncoderTrainer, settings: Settings, run: RunFolder, *, command: str) -> None:
    """Write curves, the best model and, last, the results, and print them.

    Args:
        trainer: The trainer, after its last step.
        settings: Settings of the run.
        run: The folder.
        command: The command that reproduces the run.

    Raises:
        OSError: A file could not be written; the message names it and how to continue.
    """
    took, step = costs(trainer, steps=settings.steps), write_curves(trainer, run)
    reached = trainer.state.best_metric
    assert reached is not None
    test, val = trainer.splits.test, trainer.splits.val
    assert test is not None, "a run that classifies opens the test split"
    best, share = score_best(trainer, settings, run)
    with best_folder(run) as partial:
        best.save_pretrained(partial)
    place, guesses = _place(settings, command), _guesses(settings.task, trainer.splits)
    rows = [
        accuracy_row(best.config, "test accuracy", share, len(test), place),
        accuracy_row(best.config, "validation accuracy", reached, len(val), place),
        *(result_row(best.config, f"{name} of test", told, "", place) for name, told in guesses.items()),
        *(result_row(best.config, *each, place) for each in took),
    ]
    write_rows(run, rows)
    beside = ", ".join(f"{name} {told:.1%}" for name, told in guesses.items())
    print(
        f"test accuracy {share:.1%} ({rows[0].low:.1%} to {rows[0].high:.1%} on {len(test)} samples), {beside}; best "
        f"after step {step} with validation accuracy {reached:.1%}; "
        f"{took[0][1]:.0f} s of training\n"
        f"model  {run.best}\ncurves {run.curves}, {run.plot}\nrows   {run.rows}"
    )


def _guesses(task: str, splits: Splits) -> dict[str, float]:
    """Accuracies on the test split of baselines without a model."""
    assert splits.test is not None, "a run that classifies opens the test split"
    known = {"largest class": splits.test.majority_share}
    guess = find_task(task).guess
    return known if guess is None else known | {guess.name: guess.share(splits.train, splits.test)}


def score_best(trainer: EncoderTrainer, settings: Settings, run: RunFolder) -> tuple[Model, float]:
    """The best model, and its accuracy on the test split; ranks that share samples must call it together.

    Args:
        trainer: The trainer, after its last step.
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
    took, step = costs(trainer, steps=settings.steps), write_curves(trainer, run)
    best = EncoderModel.from_pretrained(run.checkpoint(step))
    if settings.ema:
        load_mean(best, run.checkpoint(step))
    with best_folder(run) as partial:
        best.save_pretrained(partial)
    [logged] = [entry for entry in trainer.state.log_history if entry["step"] == step and "eval_loss" in entry][-1:]
    place, val = _place(settings, command), trainer.splits.val
    accuracy, loss = logged["eval_accuracy"], logged["eval_loss"]
    rows = [
        result_row(best.config, ACCURACY, accuracy, "", place, repeats=len(val)),
        result_row(best.config, LOSS, loss, "", place, repeats=len(val)),
        *(result_row(best.config, *each, place) for each in took),
    ]
    rows = [replace(row, study=f"pretrain {settings.task}") for row in rows]
    write_rows(run, rows)
    print(
        f"of the masked tokens of {len(val)} validation samples {accuracy:.1%} are predicted, loss {loss:.4g}; best "
        f"after step {step}; {took[0][1]:.0f} s of training\n"
        f"model  {run.best}\ncurves {run.curves}, {run.plot}\nrows   {run.rows}"
    )


def _place(settings: Settings, command: str) -> Place:
    return Place(settings.device, settings.precision, settings.seed, setting_facts(settings), command)
