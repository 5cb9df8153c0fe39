"""Train a model on a task, and evaluate a saved one.

Everything that determines the result is resolved and checked here; the data, the model and the Trainer follow in
`nystrom_lab.training.arena`, which is imported only then, so that this module needs no torch. On the same
machine and with the same number of processes, a run that was killed and resumed ends with the weights and the curves of
one that was not; up to rounding with more than two processes, which add gradients in an order that is not fixed.
"""

from dataclasses import replace
from pathlib import Path

from nystrom.checks import check_at_least
from nystrom.command_options import taking
from nystrom_lab.config import EvaluateOptions, TrainOptions
from nystrom_lab.measure.rows import Row
from nystrom_lab.training.hardware import is_main, usable_device, usable_precision
from nystrom_lab.training.lengths import data_positions, lengthened
from nystrom_lab.training.presets import find_preset
from nystrom_lab.training.run.folder import RunFolder
from nystrom_lab.training.run_settings import settle


@taking(TrainOptions)
def train(asked: TrainOptions) -> Path:
    """Train a model on a task, choose its best checkpoint on the validation split, and evaluate it on the test split.

    With `mask_share` the model learns to predict masked tokens of the task's own inputs instead of their class, and the
    test split is not read: `nystrom pretrain TASK`. Another run can start from this encoder with `model`.

    Arguments that are not given take the preset's values. Under torchrun the processes share each batch. A run can be
    interrupted at any time and continued with `resume`.

    Returns:
        The folder of the run; the best model is in its folder best.

    Raises:
        ValueError: An invalid name, number, folder, device or precision; raised before data or model are created.
        FloatingPointError: The loss or a weight is no longer finite.
    """
    from nystrom_lab.training.data.tasks import check_data

    task, max_length = asked.task, asked.max_length
    start = None
    if asked.model is not None:
        from nystrom_lab.training.encoder_start import find_encoder

        start = find_encoder(Path(asked.model))
    name = asked.preset or (start and start.preset) or "nystromformer"
    preset = find_preset(task, name) if max_length is None else lengthened(find_preset(task, name), max_length)
    if asked.mask_share:
        for about in ("pooling", "pooled_norm", "label_smoothing", "denoise"):
            if value := getattr(asked, about):
                raise ValueError(f"{about} is {value!r}, but masked tokens have no class: leave it out.")
    shown = asked.attention or ("nystrom" if start is None else start.config.attention)
    parts = ["pretrain"] if asked.mask_share else []
    parts += [task, shown, name, *(["pretrained"] if start else []), *([str(max_length)] if max_length else [])]
    run = RunFolder(Path("runs") / "-".join([*parts, f"seed{asked.seed}"]) if asked.to is None else Path(asked.to))
    data = None if asked.data is None else Path(asked.data)
    if data is None:
        asked.check_no_columns("no data are named with --data")
        data = run.data_folder()
    check_data(task, data)
    settings = settle(
        replace(asked, preset=name, data=data, to=run.path, resume=run.is_resumed(asked.resume)),
        positions=data_positions(preset, data) if max_length is None else max_length,
        start=start,
    )
    with run.held(settings, resume=settings.resume, main=is_main()):
        from nystrom_lab.training.arena import train_model

        train_model(settings, preset, run)
    return run.path


@taking(EvaluateOptions)
def evaluate(asked: EvaluateOptions) -> Row:
    """Evaluate a saved model on all samples of one split.

    Returns:
        The accuracy as a row of `nystrom_lab.measure.rows`, between 0 and 1, with its 95 % interval.

    Raises:
        ValueError: An invalid name, folder, device or precision, or a model for another task or other classes.
    """
    check_at_least("batch_size", asked.batch_size, 1)
    device = usable_device(asked.device)
    precision = usable_precision(asked.precision, device)

    from nystrom_lab.training.data.tasks import check_data
    from nystrom_lab.training.scoring import score

    check_data(asked.task, Path(asked.data))
    return score(replace(asked, model=Path(asked.model), data=Path(asked.data), device=device, precision=precision))
