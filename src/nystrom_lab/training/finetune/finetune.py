"""Fine-tune an encoder on a task of GLUE, on IMDB, or on labelled texts of a user.

Names, numbers, files and labels are checked here, before torch is imported; the model, its tokenizer and its attention
in `nystrom_lab.training.finetune.finetune_model`, before anything is trained.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from nystrom.attention.plan import PLAN, read_plan
from nystrom.checks import check_at_least
from nystrom_lab.data.language.labelled.splits import LabelKind
from nystrom_lab.training.command import option_words
from nystrom_lab.training.finetune.finetune_settings import (
    PAPER_GRID,
    PRESET,
    Choices,
    SearchGrid,
    TrainingExtent,
    model_name,
)
from nystrom_lab.training.finetune.request import Request, Texts
from nystrom_lab.training.grid.request import NO_SLURM, Slurm, Where
from nystrom_lab.training.grid.slurm import Jobs
from nystrom_lab.training.hardware import is_main, usable_device, usable_precision
from nystrom_lab.training.options import RunOptions, taking
from nystrom_lab.training.run.folder import RunFolder

NO_GRID = SearchGrid()


@taking(how=RunOptions)
def finetune(
    task: str | None = None,
    *,
    model: str,
    data: tuple[Path, ...],
    to: Path | None = None,
    attention: str | None = None,
    options: Mapping[str, object] | None = None,
    plan: Path | None = None,
    text_field: str | None = None,
    label_field: str | None = None,
    pair_field: str | None = None,
    labels: LabelKind = "auto",
    val_share: float | None = None,
    epochs: float | None = None,
    steps: int | None = None,
    batch_size: int = PRESET.batch_size,
    learning_rate: float = PRESET.learning_rate,
    max_length: int | None = None,
    how: RunOptions,
    warmup_steps: int | None = None,
    evaluate_every: int | None = None,
    search: bool = False,
    grid: SearchGrid = NO_GRID,
    jobs: int | None = None,
    on: Where = "local",
    slurm: Slurm = NO_SLURM,
) -> Path:
    """Fine-tune a model, choose its best checkpoint on the validation split, score that, and write its predictions.

    The defaults are the paper's: batches of 32, AdamW at 3e-5, 4 epochs. A run can be interrupted at any time and
    continued by the same command with `resume`.

    Args:
        task: cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte, wnli or imdb; left out for texts of your own.
        model: Folder of an encoder with its tokenizer, or OWNER/NAME: of this library, a published Nyströmformer, or
            any encoder of transformers.
        data: GLUE's folder of the task, or files: .tsv, .csv, .jsonl, .parquet, compressed or not, named train, dev and
            test; or a folder saved by Hugging Face datasets.
        to: Folder of the run; runs/finetune-TASK-MODEL-ATTENTION-seedSEED if not given.
        attention: Method in place of the model's attention; "softmax" is exact. The model's own if not given.
        options: Options of the method.
        plan: File of a method for each layer, which `nystrom inspect --budget` writes, in place of one for all.
        text_field: Column of the texts, of the first of each pair; the usual names if not given.
        label_field: Column of the labels.
        pair_field: Column of the second text of each pair; your own data are single texts without it.
        labels: Whether the labels of your own data are classes or numbers; "auto" means numbers if one is not whole.
        val_share: Share of the training texts that becomes validation; a tenth where there is no validation split.
        epochs: Passes over the training texts; 4 if neither this nor steps is given.
        steps: Steps, in place of epochs.
        batch_size: Texts per step, over all processes and accumulated parts.
        learning_rate: Learning rate at the end of the warm-up.
        max_length: Tokens that a text, or a pair, is cut to; 512, or the model's positions where these are fewer.
        **how: How it runs.
        warmup_steps: Steps of linear warm-up; a tenth of all if not given.
        evaluate_every: Steps between evaluations, each followed by a checkpoint; once per epoch if not given.
        search: Train with each batch size of 8, 16, 32 and each learning rate of 2e-5, 3e-5, 4e-5, 5e-5, as the paper
            for MRPC, and score the run that is best on validation.
        grid: Other values to search.
        jobs: Trials of a search at a time on a cluster; all if not given. Here they are trained one after the other.
        on: "local", or "slurm": a job for each trial of a search, on the cluster that this machine submits to, on
            one core if threads is not given. This process may end before they do; the same command waits for them
            again.
        slurm: What each job asks for.

    Returns:
        The folder of the run; the best model is in its folder best, predictions are in predictions.

    Raises:
        ValueError: A name, number, file, label, model, device or precision that cannot be used, or jobs that failed.
        FloatingPointError: The loss or a weight is no longer finite.
    """
    if plan is not None and (attention is not None or options):
        raise ValueError("plan says what each layer does, and attention or its options are given too: leave one out.")
    planned = None if plan is None else read_plan(plan)
    extent = TrainingExtent(
        epochs=epochs, steps=steps, batch_size=batch_size, warmup_steps=warmup_steps, evaluate_every=evaluate_every
    )
    texts = Texts(task, tuple(data), text_field, label_field, pair_field, labels, val_share)
    if search and grid:
        raise ValueError(
            f"search asks for the paper's grid, and {', '.join(f'search.{name}' for name in grid.values())} for "
            "another: leave one out."
        )
    wanted = grid or (PAPER_GRID if search else None)
    given = {"epochs": epochs is not None, "batch_size": batch_size != PRESET.batch_size}
    given |= {"learning_rate": learning_rate != PRESET.learning_rate, "seed": how.seed != 0}
    if wanted is not None:
        _check_searched(wanted, given, steps)
    _check_jobs(on, slurm, jobs, searches=wanted is not None)
    method = attention if plan is None else "plan"
    words = (
        "finetune",
        texts.name,
        model_name(model).replace("/", "-"),
        *([method] if method else ()),
        f"seed{how.seed}",
    )
    run = RunFolder(Path("runs") / "-".join(words) if to is None else Path(to))
    elsewhere = on == "slurm"
    device = slurm.device(how.device, how.precision) if elsewhere else usable_device(how.device)
    precision = usable_precision(how.precision, device, has_bfloat16=elsewhere or None)
    how = replace(how, device=device, precision=precision)
    cluster = None
    if elsewhere:
        how = replace(how, threads=how.threads or 1)
        cluster = Jobs(run.path, slurm, cpus=how.threads or 1, at_once=jobs)
    named: dict[str, object] = {"model": model, "data": data, "attention": attention, "plan": plan}
    named |= options or {}
    named |= texts.fields() | {"labels": None if labels == "auto" else labels, "val_share": val_share}
    named |= {"epochs": epochs}
    named |= {"steps": steps, "batch_size": batch_size, "learning_rate": learning_rate, "max_length": max_length}
    named |= {
        "seed": how.seed,
        "accumulation": None if how.accumulation == 1 else how.accumulation,
        "warmup_steps": warmup_steps,
    }
    named |= {f"search.{key}": values for key, values in grid.values().items()}
    named |= {"search": search or None}
    named |= {"evaluate_every": evaluate_every, "precision": how.precision, "device": how.device, "to": run.path}
    named |= {"track_error": how.track_error or None}
    named |= {"context_parallel": None if how.context_parallel == 1 else how.context_parallel}
    request = Request(
        texts,
        Choices(
            extent,
            learning_rate=learning_rate,
            max_length=max_length,
            seed=how.seed,
            accumulation=how.accumulation,
            device=how.device,
            precision=how.precision,
            track_error=how.track_error,
            context_parallel=how.context_parallel,
        ),
        model=model,
        attention=attention if planned is None else PLAN,
        options=options if planned is None else planned.options,
        folder=run.path if cluster is None else cluster.to,
        threads=how.threads,
        grid=wanted,
        words=("finetune", *([] if task is None else [task]), *option_words(named)),
    )
    material = request.read()
    if is_main():
        for remark in material.data.remarks:
            print(f"notice: {remark}.", flush=True)

    from nystrom_lab.training.finetune.finetune_model import finetune_model

    finetune_model(request, material, resume=run.is_resumed(how.resume), timeout=how.timeout, cluster=cluster)
    return run.path


def _check_searched(grid: SearchGrid, given: Mapping[str, bool], steps: int | None) -> None:
    """Raise ValueError where a value is given beside the ones that are searched in its place."""
    for name in grid.values():
        if given[name]:
            raise ValueError(f"{name} is given, and a search tries others: leave it out, or name it in search.{name}.")
    if steps is not None and grid.epochs:
        raise ValueError("steps are given, and a search tries numbers of epochs: leave steps or search.epochs out.")


def _check_jobs(on: str, slurm: Slurm, jobs: int | None, *, searches: bool) -> None:
    """Check what is asked of a cluster, before it is asked."""
    slurm.check(on)
    if on == "slurm" and not searches:
        raise ValueError(
            "on is 'slurm' but nothing is searched: add --search, or start one fine-tuning in a job of your own, with "
            "sbatch."
        )
    if on == "local" and jobs is not None:
        raise ValueError(f"jobs is {jobs} but on is 'local', where one trial follows the other: add --on slurm.")
    check_at_least("jobs", 1 if jobs is None else jobs, 1)
