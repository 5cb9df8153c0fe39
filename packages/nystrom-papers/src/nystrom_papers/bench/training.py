"""Time and peak memory of a whole training step on the five tasks of the Long Range Arena: Table 2 of Skyformer.

A step is the forward pass with dropout, the loss, the backward pass and the update by AdamW, with the model and the
batch that `nystrom_papers.bench.lra_steps` describes. The methods of a task take turns: see
`nystrom_papers.bench.harness`.
Quantities are "text step time" and "text step memory", the peak beyond weights, optimizer and batch.

Each method first takes steps with an eighth of the batch: one to warm up, one for the time and one for the memory,
which tell whether a full step would fit.

Source: Chen et al. (2021), arXiv:2111.00035, section 5 and Table 2; Xiong et al. (2021), arXiv:2102.03902. The batches
are those of the former.
Departs from the paper: one step instead of 50,000 with their evaluations; the fused softmax is measured in addition to
the materialised one.
"""

from nystrom.whole_files import check_folder
from nystrom_lab.measure.rows import Row
from nystrom_papers.bench.options import TrainingOptions, command_line, find_device


def run_training(options: TrainingOptions) -> list[Row]:
    """Measure the rows of `TrainingOptions`.

    Raises:
        ValueError: An unknown or out-of-range argument, or a folder that holds another setting.
    """
    from nystrom_papers.bench.contenders import find_method
    from nystrom_papers.bench.lra_steps import measure_tasks, step_setup

    for name in options.methods:
        find_method(name)
    command = command_line(("nystrom", "bench", "training"), TrainingOptions, vars(options), "tasks")
    setup = step_setup(options, command, find_device(options.device))
    check_folder(options.to)
    return measure_tasks(options.tasks, setup, options.to / "training.csv")
