"""Fine-tune an encoder on a task of GLUE, on IMDB, or on a user's labelled texts, from the options to the results.

Names, numbers, files and labels are checked first; then the model, its tokenizer and its attention, before anything is
trained.
"""

from dataclasses import fields, replace
from pathlib import Path

import torch

from nystrom.attention.plan import PLAN, read_plan
from nystrom.checks import check_at_least
from nystrom_lab.config import PAPER_GRID, FinetuneOptions, SearchGrid, asked_words
from nystrom_lab.training.finetune.classifier import (
    find_classifier,
)
from nystrom_lab.training.finetune.finetune_settings import (
    check_extent,
    model_name,
)
from nystrom_lab.training.finetune.run import OWN, LabelledInputs, chosen_task, read_texts, run_once, settle
from nystrom_lab.training.grid.slurm import Jobs
from nystrom_lab.training.hardware import is_main, usable_device, usable_precision
from nystrom_lab.training.ranks import leaving_the_group
from nystrom_lab.training.run_folder import RunFolder
from nystrom_lab.training.run_progress import no_file_bars


def finetune(asked: FinetuneOptions) -> Path:
    """Fine-tune a model, choose its best checkpoint on the validation split, evaluate it, and write its predictions.

    The defaults are the paper's: batches of 32, AdamW at 3e-5, 4 epochs. A run can be interrupted at any time and
    continued by the same command with `resume`.

    Returns:
        The folder of the run; the best model is in its folder best, predictions are in predictions.

    Raises:
        ValueError: An invalid name, number, file, label, model, device or precision, or failed jobs.
        FloatingPointError: The loss or a weight is no longer finite.
    """
    if asked.plan is not None and (asked.attention is not None or asked.options):
        raise ValueError(
            "plan sets the method of each layer, and attention or its options are also given: leave one out."
        )
    planned = None if asked.plan is None else read_plan(asked.plan)
    asked = replace(asked, data=tuple(asked.data))
    check_extent(asked)
    chosen_task(asked)
    if asked.search and asked.grid:
        raise ValueError(
            f"search asks for the paper's grid, and {', '.join(f'search.{name}' for name in asked.grid.values())} for "
            "another: leave one out."
        )
    grid = PAPER_GRID if asked.search else asked.grid
    _check_searched(grid, asked)
    _check_jobs(asked, searches=bool(grid))
    method = asked.attention if planned is None else "plan"
    name = "-".join(
        ["finetune", asked.task or OWN, model_name(asked.model).replace("/", "-"), *([method] if method else [])]
    )
    run = RunFolder(Path(asked.to or Path("runs") / f"{name}-seed{asked.seed}"))
    elsewhere, slurm = asked.on == "slurm", asked.slurm
    device = slurm.device(asked.device, asked.precision) if elsewhere else usable_device(asked.device)
    precision = usable_precision(asked.precision, device, has_bfloat16=elsewhere or None)
    asked = replace(asked, to=run.path, device=device, precision=precision)
    words = ("finetune", *([] if asked.task is None else [asked.task]), *asked_words(asked, options=""))
    cluster = None
    if elsewhere:
        asked = replace(asked, threads=asked.threads or 1)
        cluster = Jobs(run.path, slurm, cpus=asked.threads or 1, at_once=asked.jobs)
    if planned is not None:
        asked = replace(asked, attention=PLAN, options=planned.options, plan=None)
    labelled = read_texts(asked, words)
    if is_main():
        print(labelled.data.summary(), flush=True)
        for remark in labelled.data.remarks:
            print(f"notice: {remark}.", flush=True)
    asked = replace(asked, grid=grid, resume=run.is_resumed(asked.resume))
    finetune_model(asked, run, labelled, cluster)
    return run.path


def _check_searched(grid: SearchGrid, asked: FinetuneOptions) -> None:
    """Raise ValueError if a value is given that is also searched."""
    defaults = {entry.name: entry.default for entry in fields(FinetuneOptions)}
    for name in grid.values():
        if getattr(asked, name) != defaults[name]:
            raise ValueError(
                f"{name} is given, but the search tries other values: leave it out, or name it in search.{name}."
            )
    if asked.steps is not None and grid.epochs:
        raise ValueError("steps are given, but the search tries numbers of epochs: leave steps or search.epochs out.")


def _check_jobs(asked: FinetuneOptions, *, searches: bool) -> None:
    """Check the cluster options before submitting jobs."""
    asked.slurm.check(asked.on)
    if asked.on == "slurm" and not searches:
        raise ValueError(
            "on is 'slurm' but nothing is searched: add --search, or start a single fine-tuning in your own job, with "
            "sbatch."
        )
    if asked.on == "local" and asked.jobs is not None:
        raise ValueError(f"jobs is {asked.jobs} but on is 'local', where trials run one at a time: add --on slurm.")
    check_at_least("jobs", 1 if asked.jobs is None else asked.jobs, 1)


@leaving_the_group
def finetune_model(asked: FinetuneOptions, run: RunFolder, labelled: LabelledInputs, cluster: Jobs | None) -> None:
    """Fine-tune a model on loaded texts, or search; see `finetune`.

    Args:
        asked: The user's options, with device and precision resolved from "auto".
        run: The folder of the run, or of the search.
        cluster: Cluster on which the trials of a search run as jobs; None for this machine.
    """
    if asked.threads is not None and cluster is None:
        torch.set_num_threads(asked.threads)
    with no_file_bars():
        start = find_classifier(asked.model, attention=asked.attention, options=asked.options)
        if asked.grid:
            from nystrom_lab.training.finetune.search import search_here, search_in_jobs

            if cluster is None:
                search_here(asked, start, labelled)
            else:
                search_in_jobs(asked, start, labelled, cluster)
            return
        settings = settle(start, labelled, asked)
        with run.held(settings, resume=asked.resume, main=is_main()):
            run.check_data(labelled.data.fingerprint())
            if not run.is_done(resume=asked.resume):
                run_once(start, labelled, settings, run, resume=asked.resume)
