"""Time and peak memory of a whole training step on the five tasks of the Long Range Arena: Table 2 of Skyformer.

A step is the forward pass with dropout, the loss, the backward pass and the update by AdamW, with the model and the
batch that `nystrom_lab.bench.lra_steps` describes. The methods of a task take turns: see `nystrom_lab.bench.harness`.
Quantities are "text step time" and "text step memory", the peak beyond weights, optimizer and batch.

Each method first takes steps with an eighth of the batch: one to warm up, one for the time and one for the memory,
which tell whether a full step would fit.

Source: Chen et al. (2021), arXiv:2111.00035, section 5 and Table 2; Xiong et al. (2021), arXiv:2102.03902. The batches
are those of the former.
Departs from the paper: one step instead of 50,000 with their evaluations; the fused softmax is measured in addition to
the materialised one.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from nystrom.checks import check_at_least, check_choice, check_names
from nystrom.command_options import taking
from nystrom.whole_files import check_folder
from nystrom_lab.bench.options import TimingOptions, command_line, find_device
from nystrom_lab.data.lra.facts import LRA
from nystrom_lab.measure.rows import Row

StepDtype = Literal["float32", "bfloat16"]
# The methods of Table 2 of Skyformer, with their numbers, fused exact attention, and near_far.
TABLE_2_METHODS = (
    "softmax-materialised", "softmax", "kernelized", "nystrom-128", "linformer-128", "informer-128", "performer-128",
    "reformer-2", "bigbird-3", "skyformer-128", "near_far",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TrainingOptions(TimingOptions):
    """Of `nystrom bench training`.

    Attributes:
        tasks: listops, text, retrieval, image, pathfinder.
        methods: Methods of this library with their number, such as nystrom-128; ratios are taken against the first.
        batch: Samples of a step; None takes the paper's: 32, 16, 16, 256 and 128.
        precision: float32, or bfloat16 for autocast with float32 weights.
        to: Folder of the results.
    """

    tasks: tuple[str, ...] = tuple(LRA)
    methods: tuple[str, ...] = TABLE_2_METHODS
    batch: int | None = None
    precision: StepDtype = "float32"
    repeats: int = 3
    to: Path = Path("runs/training")

    def __post_init__(self):
        super().__post_init__()
        for name in ("tasks", "methods"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty; expected at least one.")
        check_names("task", self.tasks, LRA)
        check_choice("precision", self.precision, get_args(StepDtype))
        if self.batch is not None:
            check_at_least("batch", self.batch, 1)


@taking(TrainingOptions)
def run_training(options: TrainingOptions) -> list[Row]:
    """Measure time and peak memory of a training step with each method, on the tasks of the Long Range Arena.

    Rows go to training.csv in the folder, a task at a time. The same command continues an interrupted run and skips
    the tasks that are done.

    Raises:
        ValueError: An unknown or out-of-range argument, or a folder that holds another setting.
    """
    from nystrom_lab.bench.contenders import find_method
    from nystrom_lab.bench.lra_steps import measure_tasks, step_setup

    for name in options.methods:
        find_method(name)
    command = command_line(("nystrom", "bench", "training"), run_training, vars(options), "tasks")
    setup = step_setup(options, command, find_device(options.device))
    check_folder(options.to)
    return measure_tasks(options.tasks, setup, options.to / "training.csv")
