"""The overhead of the training engine over a bare PyTorch loop around the same model, and the time to load a batch.

Both train a copy of the model on the same batches, step by step in turn, so that a slowdown of the machine affects
both. A step of the engine is everything between the ends of two steps: loading, forward, backward, clipping, the
optimizer, the schedule, logging. Evaluations and checkpoints are left out. A step of the bare loop is a batch of a
plain DataLoader, forward, backward, clipping, the optimizer and the schedule. The two are compared step by step, since
a batch of long texts takes longer than one of short ones.

Loading is the time that the bare loop waits for its batch, which it makes between the steps: no batch is prepared
ahead.
"""

from pathlib import Path

from nystrom.checks import check_at_least
from nystrom_lab.config import Device, Precision
from nystrom_lab.measure.rows import Row


def run_overhead(
    task: str = "listops",
    *,
    to: Path,
    attention: str = "nystrom",
    preset: str = "skyformer",
    data: Path | None = None,
    steps: int = 50,
    seed: int = 0,
    precision: Precision = "auto",
    device: Device = "auto",
    threads: int | None = None,
) -> list[Row]:
    """Measure a training step of the engine and one of a bare loop side by side, and the loading of a batch.

    Args:
        task: Task, at the shapes of the preset.
        to: Folder of the rows, overhead.csv.
        attention: Method.
        preset: The preset that gives the settings.
        data: Prepared data. Default: the data of the preset.
        steps: Steps to measure with each of the two.
        seed: Seed of initial weights and batches.
        precision: "auto" is bfloat16 autocast on an accelerator that has it, and float32 elsewhere.
        device: "auto" uses an accelerator if there is one.
        threads: CPU threads. Default: torch's choice.

    Returns:
        Rows of the times of a step, of loading, and of the ratio of the steps: medians, spread by their quartiles.

    Raises:
        ValueError: An invalid name, number, folder, device or precision.
    """
    check_at_least("steps", steps, 1)
    from nystrom_lab.bench.engine_turns import measure_turns

    return measure_turns(
        task,
        to=to,
        attention=attention,
        preset=preset,
        data=data,
        steps=steps,
        seed=seed,
        precision=precision,
        device=device,
        threads=threads,
    )
