"""The results of a finished pretraining: its curves, the best model with its tokenizer, and rows.

Evaluating a saved model gives the same rows.
"""

import math
from pathlib import Path
from typing import Any

from nystrom.checks import check_at_least
from nystrom.models import EncoderConfig
from nystrom.models.files.folder import copy_tokenizer
from nystrom.models.heads.language import EncoderForPreTraining
from nystrom_lab.data.language.mlm_sop.dataset import MlmSop
from nystrom_lab.data.store.prepared_folder import verify
from nystrom_lab.measure.rows import Row
from nystrom_lab.training.pretrain.data import HeldOutInstances
from nystrom_lab.training.pretrain.pretrain_settings import PretrainingSettings
from nystrom_lab.training.pretrain.scores import Scores, score_model
from nystrom_lab.training.pretrain.source import check_vocabulary, find_source
from nystrom_lab.training.pretrain.trainer import PretrainingTrainer
from nystrom_lab.training.results import Place, result_row, wilson
from nystrom_lab.training.run.finished import best_folder, costs, write_curves, write_rows
from nystrom_lab.training.run.folder import RunFolder
from nystrom_lab.training.run.progress import no_file_bars

STUDY = "pretrain mlm-sop"


def finish(
    trainer: PretrainingTrainer, settings: PretrainingSettings, run: RunFolder, data: Path, *, command: str
) -> None:
    """Write curves, the best model and, last, the results, and print them.

    Args:
        trainer: The trainer, after its last step.
        settings: Settings of the run.
        run: The folder.
        data: The prepared folder, whose tokenizer is saved with the model.
        command: The command that reproduces the run.

    Raises:
        OSError: A file could not be written; the message names it and how to continue.
    """
    took, best = costs(trainer, steps=settings.steps), write_curves(trainer, run)
    model = EncoderForPreTraining.from_pretrained(run.checkpoint(best))
    with best_folder(run) as partial:
        model.save_pretrained(partial)
        copy_tokenizer(data, partial, max_length=model.config.max_position_embeddings)
    [logged] = [entry for entry in trainer.state.log_history if entry["step"] == best and "eval_loss" in entry][-1:]
    values: dict[str, Any] = {name: logged[f"eval_{name}"] for name in Scores._fields}
    scores = Scores(**values)
    place = Place(
        device=settings.device,
        precision=settings.precision,
        seed=settings.seed,
        facts=_facts(settings),
        command=command,
    )
    rows = score_rows(model.config, scores, place, length=settings.length)
    write_rows(run, [*rows, *(result_row(model.config, *each, place, study=STUDY) for each in took)])
    print(
        f"{summary(scores)}; best after step {best} of {settings.steps}, {took[0][1]:.0f} s of training\n"
        f"model  {run.best}\ncurves {run.curves}, {run.plot}\nrows   {run.rows}"
    )


def score_folder(
    folder: Path, data: Path, *, length: int | None, instances: int, batch_size: int, device: str, precision: str
) -> list[Row]:
    """Score a saved model; see `nystrom_lab.training.pretrain.pretrain.evaluate_mlm_sop`."""
    source = find_source(folder)
    architectures = source.config.architectures if source.own else None
    if architectures != [EncoderForPreTraining.__name__]:
        raise ValueError(
            f"model {folder} has no head for the order of sentences: name a model of `nystrom pretrain`, such as "
            "RUN/best."
        )
    positions: int = source.config.max_position_embeddings
    length = positions if length is None else length
    check_at_least("length", length, 8)
    if length > positions:
        raise ValueError(f"length is {length} but model {folder} has {positions} positions: use fewer tokens.")
    verify(data, task=MlmSop.task)
    held_out = HeldOutInstances(MlmSop(data, "val", length=length), instances)
    check_vocabulary(source, data, held_out.data.vocabulary)
    with no_file_bars():
        model = EncoderForPreTraining.from_pretrained(folder)
    scores = score_model(model, held_out, batch_size=batch_size, device=device, precision=precision)
    return score_rows(model.config, scores, Place(device=device, precision=precision, seed=None), length=length)


def score_rows(config: EncoderConfig, scores: Scores, place: Place, *, length: int) -> list[Row]:
    """Scores as rows; `repeats` is the number of masked words, or of instances."""
    rows = []
    for name, words in (("MLM", True), ("SOP", False)):
        samples = scores.words if words else scores.instances
        right = scores.mlm_accuracy if words else scores.sop_accuracy
        measured: list[tuple[str, float, tuple[float, float] | tuple[None, None]]] = [
            (f"validation {name} accuracy", right, wilson(right, samples)),
            (f"validation {name} loss", scores.mlm_loss if words else scores.sop_loss, (None, None)),
        ]
        if words:
            measured.append(("validation perplexity", scores.perplexity, (None, None)))
        rows += [
            result_row(
                config,
                quantity,
                value,
                "",
                place,
                spread=spread,
                repeats=samples,
                study=STUDY,
                facts={} if length == config.max_position_embeddings else {"length": length},
                note="the exponential of the loss is beyond float64" if value == scores.perplexity == math.inf else "",
            )
            for quantity, value, spread in measured
        ]
    return rows


def summary(scores: Scores) -> str:
    """Scores in one line."""
    return (
        f"held out: MLM accuracy {scores.mlm_accuracy:.1%}, loss {scores.mlm_loss:.3f}, perplexity "
        f"{scores.perplexity:.4g} ({scores.words} masked words); SOP accuracy {scores.sop_accuracy:.1%}, loss "
        f"{scores.sop_loss:.3f} ({scores.instances} instances)"
    )


def _facts(settings: PretrainingSettings) -> dict[str, object]:
    """The facts that distinguish runs: the preset, the model that it starts from, and the training."""
    return {
        "preset": settings.preset,
        "model": settings.model,
        "steps": settings.steps,
        "batch": settings.batch_size,
        "lr": settings.learning_rate,
    }
