"""The grid of the Long Range Arena: one run for each task, method and seed, several in parallel.

    FOLDER/TASK-METHOD-PRESET-seedSEED/       the run, see `nystrom_lab.training.run_folder`
    FOLDER/TASK-METHOD-PRESET-seedSEED.log    output of its process
    FOLDER/lra.csv                            the rows of all runs that were finished here

Each run is a process of this machine, see `nystrom_lab.training.grid.processes`, or a job of a cluster, see
`nystrom_lab.training.grid.slurm`.

Everything is checked before the first run starts: names, settings, data, and that runs in the folder were made with the
same. Finished runs are skipped, interrupted ones continue from their last checkpoint; with the same number of threads
the result is that of an uninterrupted run. `lra.csv` is brought up to the runs' own rows whenever one finishes, and
keeps those of runs whose folders were moved away.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal

from nystrom.attention.method_names import NO_ATTENTION, read_method
from nystrom.checks import check_at_least
from nystrom_lab.config import NO_SLURM, Device, Machine, Slurm, TrainOptions, Where
from nystrom_lab.data.lra.facts import LRA
from nystrom_lab.measure.rows import check_rows, cores
from nystrom_lab.training.grid.processes import Processes
from nystrom_lab.training.grid.scheduler import Failure, Work
from nystrom_lab.training.grid.slurm import Jobs, check_no_jobs, queue
from nystrom_lab.training.grid.table import TABLE, last_line, result_of, write_table
from nystrom_lab.training.hardware import processes, usable_device, visible_gpus
from nystrom_lab.training.presets import Preset, find_preset
from nystrom_lab.training.run_folder import RunFolder, alone
from nystrom_lab.training.run_settings import Settings, data_positions, lengthened, train_options
from nystrom_lab.training.trials import SEARCH, TRIALS, outcome_of, read_search

PresetName = Literal[
    "nystromformer", "nystromformer-1000", "skyformer", "skyformer-1000", "modern", "modern-small", "demo"
]
# Until the process of an earlier command, which was killed, has let go of a run.
_WAIT_SECONDS = 120
# A task's preset, its data, and the settings of its runs by name.
TaskPlan = tuple[Preset, Path, dict[str, Settings]]


@dataclass(frozen=True, kw_only=True)
class GridOptions(Machine):
    """Train every method on every task with every seed; the same command continues interrupted runs.

    Other options have the preset's values. Runs with other settings need another folder; several sizes
    of a method can share one.

    Attributes:
        to: Folder of the runs.
        tasks: Tasks.
        methods: Names of `nystrom methods`; a number after a name sets its landmarks, features or window, as in
            nystrom-64 and linformer-128; "none" is a model without attention.
        seeds: Seeds.
        preset: The preset; those that end in -1000 are for Text only, cut at 1,000 bytes. Default: that of the model's
            run, or nystromformer.
        model: Encoder that every run starts from, such as RUN/best of `nystrom pretrain TASK`, with its settings and
            weights; give only its task and its method.
        data: Folder of the prepared data sets, each in a folder of its task's name; "TASK-demo" for the demo and
            "text-1000" for texts of 1,000 bytes. The folder of pathfinder may hold larger pictures: the models have a
            position for each pixel.
        max_length: Longest sequence in tokens, and number of positions of the models, in place of the preset's; the
            data are then in TASK-LENGTH. Not for images, whose data have a fixed size.
        accumulation: Gradient-accumulation steps, which save memory; evaluations are split likewise.
        conv_kernel_size: Kernel size of the skip convolution of the values, added to the attention of every method; 0
            for none.
        jobs: Number of parallel runs. Default: one on this machine, all on a cluster. With several GPUs each run has
            one. On the CPU a run waits while there is less free memory than earlier runs needed.
        threads: CPU threads of each run. Default: its share of the cores, or one core on a cluster.
        compile: Compile the models, see `nystrom train`.
        on: "local", or "slurm": one job per run, on the cluster of this machine. This process may end before the jobs;
            the same command waits for them again.
        slurm: Resources of each job.
        changes: Changes to the preset, by the names of the fields of `nystrom_lab.config.Arena`.
    """

    to: Path
    tasks: Sequence[str] = tuple(LRA)
    methods: Sequence[str] = ("softmax", "nystrom", "skyformer")
    seeds: Sequence[int] = (0, 1, 2)
    preset: PresetName | None = None
    model: Path | None = None
    data: Path = Path("data")
    max_length: int | None = None
    accumulation: int = 1
    conv_kernel_size: int | None = None
    jobs: int | None = None
    threads: int | None = None
    compile: bool = False
    on: Where = "local"
    slurm: Slurm = NO_SLURM
    changes: Mapping[str, Any] = field(default_factory=dict)

    def training(self, task: str, preset: str, method: str, *, seed: int, device: Device) -> TrainOptions:
        """The options of one run of the grid."""
        attention, options = (method, {}) if method == NO_ATTENTION else read_method(method)
        own = {entry.name for entry in fields(TrainOptions)} - {"task", "data", "to", "max_length", "threads"}
        same: dict[str, Any] = {name: value for name, value in vars(self).items() if name in own}
        one = {"attention": attention, "options": options, "preset": preset, "seed": seed, "device": device}
        return train_options(task, **(same | one | dict(self.changes)))


def run_grid(options: GridOptions) -> list[Failure]:
    """Train every method on every task with every seed; the same command continues interrupted runs.

    Returns:
        The runs that failed; an empty list if none did.

    Raises:
        ValueError: An invalid name, number, folder or data set, or a run in the folder with other settings or data;
            raised before anything is trained.
    """
    jobs, threads, on, slurm = options.jobs, options.threads, options.on, options.slurm
    slurm.check(on)
    check_at_least("jobs", 1 if jobs is None else jobs, 1)
    if on == "local" and (jobs or 1) > cores():
        raise ValueError(f"jobs is {jobs} but there are {cores()} cores for them: use at most {cores()}.")
    for name, values in (("tasks", options.tasks), ("methods", options.methods), ("seeds", options.seeds)):
        if not values or len(set(values)) < len(values):
            raise ValueError(
                f"{name} is {' '.join(map(str, values)) or 'empty'}; expected at least one, and each once."
            )
    if processes() > 1:
        raise ValueError("lra run starts its own processes, one for each run: start it without torchrun.")
    if threads is None:
        threads = 1 if on == "slurm" else max(1, cores() // (jobs or 1))
    check_at_least("threads", threads, 1)
    to = Path(options.to).resolve() if on == "slurm" else Path(options.to)
    data = Path(options.data).resolve() if on == "slurm" else Path(options.data)
    start, model, max_length = None, options.model, options.max_length
    if model is not None:
        from nystrom_lab.training.start import find_encoder

        start = find_encoder(Path(model).resolve() if on == "slurm" else Path(model))
    named = options.preset or (start and start.preset) or "nystromformer"
    bases = {task: find_preset(task, named) for task in options.tasks}
    for method in options.methods:
        if method != NO_ATTENTION:
            read_method(method)
    cluster = Jobs(to, slurm, cpus=threads, at_once=jobs) if on == "slurm" else None
    usable = slurm.device(options.device, options.precision) if cluster else usable_device(options.device)
    plans: list[TaskPlan] = []
    for task, published in bases.items():
        base = published if max_length is None else lengthened(published, max_length)
        folder = data / base.data.folder
        longest = data_positions(base, folder) if max_length is None else max_length
        planned = {}
        for method, seed in product(options.methods, options.seeds):
            training = options.training(task, named, method, seed=seed, device=usable)
            settings = Settings.resolve(training, num_positions=longest, start=start, elsewhere=cluster is not None)
            planned[run_name(task, method, named, seed, model, max_length)] = settings
        plans.append((base, folder, planned))
    with alone(to, "`nystrom lra run`"):
        check_rows(to / TABLE)
        if cluster is None:
            check_no_jobs(to)
        _prepare(to, plans, check_compile=options.compile and usable == "cpu" and cluster is None)
        works = [
            Work(
                name,
                train_and_tabulate,
                [str(to), training_arguments(to / name, settings, folder, threads=threads, max_length=max_length)],
                partial(result_of, RunFolder(to / name)),
            )
            for _, folder, planned in plans
            for name, settings in planned.items()
        ]
        gpus = visible_gpus() if usable == "cuda" and cluster is None else []
        write_table(to)
        failures = (cluster or Processes(to, jobs=jobs or 1, gpus=gpus)).run(works)
        write_table(to)
        return failures


def train_and_tabulate(to: str, arguments: Mapping[str, Any]) -> None:
    """Train a run, from its last checkpoint if there is one, and bring the table of the grid up to it."""
    from nystrom_lab.training.train import train

    run = RunFolder(Path(arguments["to"]))
    run.wait(_WAIT_SECONDS)
    paths = {name: Path(arguments[name]) for name in ("data", "model") if arguments.get(name) is not None}
    train(TrainOptions(**{**arguments, **paths, "to": run.path, "resume": run.is_started}))
    write_table(Path(to))


def _prepare(to: Path, plans: Sequence[TaskPlan], *, check_compile: bool) -> None:
    """Prepare the data that can be generated, and check them and the runs already started."""
    from nystrom_lab.training.compiling import check_compiler
    from nystrom_lab.training.tasks import find_task, prepare_if_missing

    # An accelerator is left to the processes of the runs, the first of which reports what it cannot compile.
    if check_compile:
        check_compiler("cpu")
    # Data read from files are looked for first, since drawing the others takes long.
    for base, folder, planned in sorted(plans, key=lambda plan: find_task(plan[0].task).prepare is not None):
        prepare_if_missing(base.task, folder, base.data)
        _check(to, planned, folder)


def _check(to: Path, planned: Mapping[str, Settings], data: Path) -> None:
    """Check that the data can be trained on, and that runs already started have these settings and data."""
    from nystrom_lab.training.tasks import fingerprint, open_splits

    first = next(iter(planned.values()))
    splits = open_splits(first.task, data, num_positions=first.longest, batch_size=first.batch_size)
    digest = fingerprint(splits, data)
    for name, settings in planned.items():
        run = RunFolder(to / name)
        if run.is_started:
            run.check_settings(settings)
            run.check_data(digest)


def run_name(task: str, method: str, preset: str, seed: int, model: Path | None, max_length: int | None) -> str:
    """The name of a run's folder, which shows a starting encoder or a length other than the preset's."""
    parts = [task, method, preset, *(["pretrained"] if model else []), *([str(max_length)] if max_length else [])]
    return "-".join([*parts, f"seed{seed}"])


def training_arguments(
    run: Path, planned: Settings, data: Path, *, threads: int, max_length: int | None = None
) -> dict[str, object]:
    """All fields of `TrainOptions` for a run, as JSON values."""
    settings = replace(planned, threads=threads, data=data, to=run, max_length=max_length)
    # The process resumes as the folder says; a grid takes prepared data, and its rows are accuracies of a test.
    others = {"resume", "timeout", "context_parallel", "mask_share", *settings.columns()}
    arguments = {
        entry.name: str(value) if isinstance(value := getattr(settings, entry.name), Path) else value
        for entry in fields(TrainOptions)
        if entry.name not in others
    }
    return arguments | {"options": dict(settings.options), "conv_kernel_size": settings.conv_kernel_size or 0}


def status_lines(to: Path) -> list[str]:
    """A line for each run in a folder: its result, or its last checkpoint, job and last line of output.

    Raises:
        ValueError: The folder holds no runs, or what this version does not read, or SLURM does not answer.
    """
    if RunFolder(to).is_started:
        raise ValueError(f"{to} is one run, whose curves.csv has its steps: name the folder of several runs.")
    read_search(to)
    jobs = queue(to)
    folders = [path for folder in (to, to / TRIALS) if folder.is_dir() for path in folder.iterdir()]
    started = {str(path.relative_to(to)) for path in folders if RunFolder(path).is_started}
    names = sorted({*jobs, *started} - {SEARCH})
    if not names:
        raise ValueError(
            f"{to} holds no runs: name the folder that `nystrom lra run` or `nystrom finetune --search` wrote to."
        )
    lines, done = [], 0
    for name in [*names, *({SEARCH} & jobs.keys())]:
        run, words = RunFolder(to / name), []
        result = str(outcome_of(run) or "") or result_of(run)
        done += bool(result)
        if not result and name != SEARCH:
            step = run.last_step() if run.is_started else None
            words = [f"step {step} of {run.read()['settings']['steps']}" if step else "no checkpoint yet"]
        if not result:
            job, state = jobs.get(name, ("", ""))
            words += [f"job {job} {state}"] if job else []
            words += [last] if state != "COMPLETED" and (last := last_line(to / f"{name}.log")) else []
        lines.append(f"{name}: {result or ', '.join(words)}")
    return [*lines, f"{done} of {len(names)} finished"]
