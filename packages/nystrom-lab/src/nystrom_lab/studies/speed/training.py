"""Time and peak memory of a whole training step on the five tasks of the Long Range Arena: Table 2 of Skyformer.

A step is the forward pass with dropout, the loss, the backward pass and the update by AdamW, with the model and the
batch that `nystrom_lab.studies.speed.lra_models` describes. The methods of a task take turns: first a warm-up step
each, then a timed step each, `repeats` times over, then a step each for the memory. Each task and method has two rows:

- "text step time": the median in ms, `low` and `high` being the quartiles;
- "text step memory": the peak beyond weights, optimizer and batch, in MB of 10^6 bytes; see `nystrom.clock`.

Before that, each method takes steps with an eighth of the batch: one to warm up, one for the time and one for the
memory. If, by these, a full step would not fit in half of the free memory, or would exceed the time limit, the method
is skipped: its rows hold NaN and a note with the estimate.

Source: Chen et al. (2021), arXiv:2111.00035, Table 2.
Departs from the paper: one step instead of 50,000 with their evaluations; the fused softmax is measured in addition to
the materialised one.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from nystrom.checks import check_at_least, check_choice, check_names, check_seed
from nystrom.whole_files import check_folder
from nystrom_lab.measure.rows import Row
from nystrom_lab.studies.speed.asked import command_line, find_device
from nystrom_lab.studies.speed.choices import StepDtype
from nystrom_lab.studies.speed.lra_shapes import SHAPES, TABLE_2_METHODS


def run_training(
    *,
    tasks: tuple[str, ...] = tuple(SHAPES),
    methods: tuple[str, ...] = TABLE_2_METHODS,
    batch: int | None = None,
    precision: StepDtype = "float32",
    device: str = "cpu",
    repeats: int = 3,
    seed: int = 0,
    threads: int | None = None,
    limit_seconds: float = 60.0,
    to: Path = Path("runs/training"),
) -> list[Row]:
    """Measure time and peak memory of a training step with each method, on the tasks of the Long Range Arena.

    Rows go to training.csv in the folder, a task at a time. The same command continues an interrupted run and skips
    the tasks that are done.

    Args:
        tasks: listops, text, retrieval, image, pathfinder.
        methods: Methods of this library with their number, such as nystrom-128; ratios are taken against the first.
        batch: Samples of a step; None takes the paper's: 32, 16, 16, 256 and 128.
        precision: float32, or bfloat16 for autocast with float32 weights.
        device: cpu, cuda or cuda:1.
        repeats: Timed steps of each method.
        seed: Seed of the weights and the batch.
        threads: CPU threads; None keeps torch's setting.
        limit_seconds: Skip steps that would take longer.
        to: Folder of the results.

    Raises:
        ValueError: An unknown or out-of-range argument, or a folder that holds another setting.
    """
    asked = dict(locals())
    _check(asked)
    import torch

    from nystrom_lab.studies.speed.lra_models import find_method
    from nystrom_lab.studies.speed.steps import StepSetup, measure_tasks

    for name in methods:
        find_method(name)
    setup = StepSetup(
        methods=tuple(dict.fromkeys(methods)),
        batch=batch,
        precision=precision,
        repeats=repeats,
        seed=seed,
        threads=torch.get_num_threads() if threads is None else threads,
        limit_seconds=limit_seconds,
        device=find_device(device),
        command=command_line(("nystrom", "bench", "training"), run_training, asked, "tasks"),
    )
    check_folder(to)
    return measure_tasks(tasks, setup, to / "training.csv")


def _check(asked: Mapping[str, Any]) -> None:
    for name in ("tasks", "methods"):
        if not asked[name]:
            raise ValueError(f"{name} is empty; expected at least one.")
    check_names("task", asked["tasks"], SHAPES)
    check_choice("precision", asked["precision"], get_args(StepDtype))
    check_at_least("repeats", asked["repeats"], 1)
    check_seed("seed", asked["seed"])
    for name in ("batch", "threads"):
        if asked[name] is not None:
            check_at_least(name, asked[name], 1)
    if not asked["limit_seconds"] > 0:
        raise ValueError(f"limit_seconds is {asked['limit_seconds']}; expected a positive number.")
