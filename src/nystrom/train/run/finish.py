"""What a finished run leaves: its curves, the best model, and rows of its results on validation and test."""

import shutil
from pathlib import Path

from nystrom.report.plots.curves import draw_curves
from nystrom.train.data.tasks import Model, class_names, find_task
from nystrom.train.results import Place, accuracy_row, result_row, setting_words
from nystrom.train.run.folder import RunFolder
from nystrom.train.run.trainer import EncoderTrainer
from nystrom.train.run.weight_mean import load_mean
from nystrom.train.run.writing import written
from nystrom.train.scoring import accuracy, load_model
from nystrom.train.settings import Settings


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
    state, seconds = trainer.state, trainer.seconds
    with written(run.path, "go on with --resume"):
        run.write_curves(trainer.curves())
        draw_curves(run.curves, run.plot)
    assert state.best_global_step, "the last step is evaluated, and counts"
    assert state.best_metric is not None
    task = find_task(settings.task)
    test, val = trainer.splits.test, trainer.splits.val
    best = load_model(run.checkpoint(state.best_global_step), settings.task, classes=class_names(test))
    if settings.ema:
        load_mean(best, run.checkpoint(state.best_global_step))
    with written(run.best, "go on with --resume"):
        _save(best, run.best)
    share = accuracy(
        best, test, task, batch_size=settings.part_size, device=settings.device, precision=settings.precision
    )
    place = Place(
        device=settings.device,
        precision=settings.precision,
        seed=settings.seed,
        settings=setting_words(settings),
        command=command,
    )
    rows = [
        accuracy_row(best.config, "test accuracy", share, len(test), place),
        accuracy_row(best.config, "validation accuracy", state.best_metric, len(val), place),
        result_row(best.config, "largest class of test", test.majority_share, "", place),
        result_row(best.config, "training time", seconds, "s", place),
        result_row(best.config, "best step", state.best_global_step, "", place),
        result_row(best.config, "steps", settings.steps, "", place),
    ]
    if trainer.megabytes:
        rows.append(result_row(best.config, "peak memory", trainer.megabytes, "MB", place))
    with written(run.rows, "go on with --resume"):
        run.write_rows(rows)
    print(
        f"test accuracy {share:.1%} ({rows[0].low:.1%} to {rows[0].high:.1%} on {len(test)} samples), largest class "
        f"{test.majority_share:.1%}; best after step {state.best_global_step} with validation accuracy "
        f"{state.best_metric:.1%}; {seconds:.0f} s of training\n"
        f"model  {run.best}\ncurves {run.curves}, {run.plot}\nrows   {run.rows}"
    )


def _save(model: Model, folder: Path) -> None:
    """Save a model under a temporary name, and move it into place."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    shutil.rmtree(folder, ignore_errors=True)
    partial.replace(folder)
