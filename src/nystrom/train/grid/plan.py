"""The grid of the Long Range Arena: tasks, methods and seeds, a run each, several at a time.

    FOLDER/TASK-METHOD-PRESET-seedSEED/       the run, see `nystrom.train.run_folder`
    FOLDER/TASK-METHOD-PRESET-seedSEED.log    what its process printed
    FOLDER/lra.csv                            the rows of all finished runs

Everything is checked before the first run starts: names, settings, data, and that runs which are there were made with
the same. Each run has its own process, see `nystrom.train.grid.processes`. What is finished is skipped, what was cut
off goes on after its last checkpoint; with the same number of threads its result is that of an unbroken run. `lra.csv`
is made anew of the runs' own rows whenever one has finished.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from filelock import FileLock, Timeout

from nystrom.checks import check_at_least
from nystrom.measure.rows import check_folder
from nystrom.train.compiling import check_compiler
from nystrom.train.data import find_task, fingerprint, open_splits, prepare_if_missing
from nystrom.train.grid.processes import Failure, Grid, Run
from nystrom.train.lengths import data_positions
from nystrom.train.presets.published import Preset, find_preset
from nystrom.train.run_folder import RunFolder
from nystrom.train.settings import Device, Precision, Settings, processes, settle, usable_device

PresetName = Literal["nystromformer", "skyformer", "demo"]

_TASKS = ("listops", "text", "retrieval", "image", "pathfinder")


def run_grid(
    *,
    to: Path,
    tasks: Sequence[str] = _TASKS,
    methods: Sequence[str] = ("softmax", "nystrom", "skyformer"),
    seeds: Sequence[int] = (0, 1, 2),
    preset: PresetName = "nystromformer",
    data: Path = Path("data"),
    steps: int | None = None,
    evaluate_every: int | None = None,
    jobs: int = 1,
    threads: int | None = None,
    precision: Precision = "auto",
    device: Device = "auto",
    compile: bool = False,
) -> list[Failure]:
    """Train every method on every task with every seed; run it again to go on with what was cut off.

    Args:
        to: Folder of the runs.
        tasks: Tasks.
        methods: Names of `nystrom methods`.
        seeds: Seeds.
        preset: Whose settings.
        data: Folder of the prepared data sets, each in a folder of its task's name; "TASK-demo" for the demo. The
            folder of pathfinder may hold larger pictures: the models have a position for each pixel.
        steps: Steps of each run; the preset's if not given. A shorter run has a warm-up shorter in proportion.
        evaluate_every: Steps between evaluations and checkpoints; the preset's, or `steps` where that is less.
        jobs: Runs at a time. On the CPU a run waits where the others leave less free memory than runs so far needed.
        threads: Threads of each run on the CPU; its share of the cores if not given.
        precision: "auto" is bfloat16 autocast on an accelerator that has it, and float32 elsewhere.
        device: "auto" is an accelerator where there is one.
        compile: Compile the models, see `nystrom train`.

    Returns:
        The runs that failed; none where all is well.

    Raises:
        ValueError: A name, number, folder or data set that cannot be used, or a run in the folder that was made with
            other settings or data; before anything is trained.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    check_at_least("jobs", jobs, 1)
    if jobs > cores:
        raise ValueError(f"jobs is {jobs} but there are {cores} cores for them: take at most {cores}.")
    for name, values in (("tasks", tasks), ("methods", methods), ("seeds", seeds)):
        if not values or len(set(values)) < len(values):
            raise ValueError(
                f"{name} is {' '.join(map(str, values)) or 'empty'}; expected at least one, and each once."
            )
    if processes() > 1:
        raise ValueError("lra run starts its own processes, one for each run: start it without torchrun.")
    threads = max(1, cores // jobs) if threads is None else threads
    check_at_least("threads", threads, 1)
    to, usable = Path(to), usable_device(device)
    check_folder(to)
    with _alone(to):
        plans: list[tuple[Preset, Path, list[Settings]]] = []
        for task in tasks:
            base = find_preset(task, preset)
            changes = _changes(base, steps, evaluate_every)
            folder = Path(data) / base.data.folder
            positions = data_positions(base, folder)
            settled = [
                settle(
                    task,
                    attention=method,
                    options=None,
                    conv_kernel_size=None,
                    preset=preset,
                    device=usable,
                    precision=precision,
                    accumulation=1,
                    seed=seed,
                    changes=changes,
                    positions=positions,
                    compile=compile,
                )
                for method in methods
                for seed in seeds
            ]
            plans.append((base, folder, settled))
        # An accelerator is left to the processes of the runs, the first of which says so where it cannot compile.
        if compile and usable == "cpu":
            check_compiler(usable)
        # Data that are read from files are asked for before others are drawn, which takes long.
        for base, folder, settled in sorted(plans, key=lambda plan: find_task(plan[0].task).prepare is not None):
            prepare_if_missing(base.task, folder, base.data)
            _check(to, settled, folder)
        runs = [_run(to, each, folder, threads) for _, folder, settled in plans for each in settled]
        return Grid(to, jobs=jobs, on_cpu=usable == "cpu").train(runs)


def _changes(preset: Preset, steps: int | None, evaluate_every: int | None) -> dict[str, float | None]:
    """What a run of so many steps changes of its preset."""
    if steps is None:
        return {"evaluate_every": evaluate_every}
    check_at_least("steps", steps, 1)
    return {
        "steps": steps,
        "warmup_steps": min(preset.warmup_steps, preset.warmup_steps * steps // preset.steps),
        "evaluate_every": min(preset.evaluate_every, steps) if evaluate_every is None else evaluate_every,
    }


def _run(to: Path, settings: Settings, data: Path, threads: int) -> Run:
    name = f"{settings.task}-{settings.attention}-{settings.preset}-seed{settings.seed}"
    arguments: dict[str, object] = {
        "task": settings.task,
        "attention": settings.attention,
        "preset": settings.preset,
        "seed": settings.seed,
        "steps": settings.steps,
        "warmup_steps": settings.warmup_steps,
        "evaluate_every": settings.evaluate_every,
        "log_every": settings.log_every,
        "device": settings.device,
        "precision": settings.precision,
        "compile": settings.compile,
        "threads": threads,
        "data": str(data),
        "to": str(to / name),
    }
    return Run(name, arguments)


def _check(to: Path, settings: Sequence[Settings], data: Path) -> None:
    """See that the data can be trained on, and that runs which are there have these settings and data."""
    first = settings[0]
    splits = open_splits(first.task, data, positions=first.max_length, batch_size=first.batch_size)
    digest = fingerprint(splits)
    for each in settings:
        run = RunFolder(to / _run(to, each, data, 1).name)
        if run.is_started:
            run.check(each, resume=True, main=False)
            run.check_data(digest)


@contextmanager
def _alone(to: Path) -> Iterator[None]:
    """Hold the folder, so that two grids do not write the same runs; the system lets go when the process ends."""
    lock = FileLock(to / ".lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise ValueError(f"{to} is in use by another `nystrom lra run`: wait for it, or take another folder.") from None
    try:
        yield
    finally:
        lock.release()
