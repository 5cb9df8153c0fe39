"""Fine-tune an encoder on a task of GLUE, on IMDB, or on a user's labelled texts, from the options to the results.

Names, numbers, the folder of the run, files and labels are checked first; then the model, its tokenizer and its
attention, before anything is trained.
"""

from dataclasses import fields, replace
from pathlib import Path

from nystrom.attention.plan import PLAN, read_plan
from nystrom.checks import check_at_least
from nystrom_lab.config import PAPER_GRID, FinetuneOptions, SearchGrid, words_of
from nystrom_lab.training.finetune.finetune_settings import (
    check_extent,
    model_name,
)
from nystrom_lab.training.finetune.inputs import OWN, chosen_task, read_texts
from nystrom_lab.training.grid.slurm import Jobs
from nystrom_lab.training.hardware import is_main, usable_device, usable_precision
from nystrom_lab.training.run_folder import RunFolder


def finetune(options: FinetuneOptions) -> Path:
    """Fine-tune a model, choose its best checkpoint on the validation split, evaluate it, and write its predictions.

    The defaults are the paper's: batches of 32, AdamW at 3e-5, 4 epochs. A run can be interrupted at any time and
    continued by the same command with `resume`.

    Returns:
        The folder of the run; the best model is in its folder best, predictions are in predictions.

    Raises:
        ValueError: An invalid name, number, file, label, model, device or precision, or failed jobs.
        FloatingPointError: The loss or a weight is no longer finite.
    """
    if options.plan is not None and (options.attention is not None or options.options):
        raise ValueError(
            "plan sets the method of each layer, and attention or its options are also given: leave one out."
        )
    planned = None if options.plan is None else read_plan(options.plan)
    options = replace(options, data=tuple(options.data))
    check_extent(options)
    chosen_task(options)
    if options.search and options.grid:
        given = ", ".join(f"search.{name}" for name in options.grid.values())
        raise ValueError(f"search asks for the paper's grid, and {given} for another: leave one out.")
    grid = PAPER_GRID if options.search else options.grid
    _check_searched(grid, options)
    _check_jobs(options, searches=bool(grid))
    method = options.attention if planned is None else "plan"
    name = "-".join(
        ["finetune", options.task or OWN, model_name(options.model).replace("/", "-"), *([method] if method else [])]
    )
    run = RunFolder(Path(options.to or Path("runs") / f"{name}-seed{options.seed}"))
    elsewhere, slurm = options.on == "slurm", options.slurm
    device = slurm.device(options.device, options.precision) if elsewhere else usable_device(options.device)
    precision = usable_precision(options.precision, device, has_bfloat16=elsewhere or None)
    options = replace(options, to=run.path, device=device, precision=precision)
    words = ("finetune", *([] if options.task is None else [options.task]), *words_of(options, prefix=""))
    cluster = None
    if elsewhere:
        options = replace(options, threads=options.threads or 1)
        cluster = Jobs(run.path, slurm, cpus=options.threads or 1, at_once=options.jobs)
    if planned is not None:
        options = replace(options, attention=PLAN, options=planned.options, plan=None)
    options = replace(options, grid=grid, resume=run.is_resumed(options.resume))
    if is_main() and not grid:
        run.check_free(resume=options.resume)
    labelled = read_texts(options, words)
    if is_main():
        print(labelled.data.summary(), flush=True)
        for remark in labelled.data.remarks:
            print(f"notice: {remark}.", flush=True)

    from nystrom_lab.training.finetune.finetune_model import finetune_model

    finetune_model(options, run, labelled, cluster)
    return run.path


def _check_searched(grid: SearchGrid, options: FinetuneOptions) -> None:
    """Raise ValueError if a value is given that is also searched."""
    defaults = {entry.name: entry.default for entry in fields(FinetuneOptions)}
    for name in grid.values():
        if getattr(options, name) != defaults[name]:
            raise ValueError(
                f"{name} is given, but the search tries other values: leave it out, or name it in search.{name}."
            )
    if options.steps is not None and grid.epochs:
        raise ValueError("steps are given, but the search tries numbers of epochs: leave steps or search.epochs out.")


def _check_jobs(options: FinetuneOptions, *, searches: bool) -> None:
    """Check the cluster options before submitting jobs."""
    options.slurm.check(options.on)
    if options.on == "slurm" and not searches:
        raise ValueError(
            "on is 'slurm' but nothing is searched: add --search, or start a single fine-tuning in your own job, with "
            "sbatch."
        )
    if options.on == "local" and options.jobs is not None:
        raise ValueError(f"jobs is {options.jobs} but on is 'local', where trials run one at a time: add --on slurm.")
    check_at_least("jobs", 1 if options.jobs is None else options.jobs, 1)
