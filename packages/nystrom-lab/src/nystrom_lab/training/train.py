"""Train a model on a task, and evaluate a saved one.

Everything that determines the result is resolved and checked here; the data, the model and the Trainer follow in
`nystrom_lab.training.run.train_model`, which is imported only then, so that this module needs no torch. On the same
machine and with the same number of processes, a run that was killed and resumed ends with the weights and the curves of
one that was not; up to rounding with more than two processes, which add gradients in an order that is not fixed.
"""

from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path

from nystrom.checks import check_at_least
from nystrom.command_options import taking
from nystrom_lab.measure.rows import Row
from nystrom_lab.training.data.columns import Columns
from nystrom_lab.training.hardware import Device, Precision, is_main, usable_device, usable_precision
from nystrom_lab.training.lengths import data_positions, lengthened
from nystrom_lab.training.options import TrainOptions
from nystrom_lab.training.presets.published import find_preset
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

    task, model, max_length = asked.task, asked.model, asked.max_length
    start = None
    if model is not None:
        from nystrom_lab.training.encoder_start import find_encoder

        start = find_encoder(Path(model))
    preset = asked.preset or (start and start.preset) or "nystromformer"
    chosen = find_preset(task, preset) if max_length is None else lengthened(find_preset(task, preset), max_length)
    if asked.mask_share:
        check_no_class(
            pooling=asked.pooling,
            pooled_norm=asked.pooled_norm,
            label_smoothing=asked.label_smoothing,
            denoise=asked.denoise,
        )
    shown = asked.attention or ("nystrom" if start is None else start.config.attention)
    parts = ["pretrain"] if asked.mask_share else []
    parts += [task, shown, preset, *(["pretrained"] if model else []), *([str(max_length)] if max_length else [])]
    run = RunFolder(Path("runs") / "-".join([*parts, f"seed{asked.seed}"]) if asked.to is None else Path(asked.to))
    data, columns = asked.data, Columns(asked.text_field, asked.label_field, asked.pair_field)
    if data is None:
        columns.check_unused("no data are named with --data")
        data = run.data_folder()
    data = None if data is None else Path(data)
    check_data(task, data)
    settings = settle(
        replace(asked, preset=preset),
        positions=data_positions(chosen, data) if max_length is None else max_length,
        start=start,
    )
    resume = run.is_resumed(asked.resume)
    with run.held(settings, resume=resume, main=is_main()):
        from nystrom_lab.training.run.train_model import train_model

        train_model(
            settings, chosen, data, run, columns=columns, resume=resume, threads=asked.threads, timeout=asked.timeout
        )
    return run.path


def check_no_class(**given: object) -> None:
    """Check that a run on masked tokens gets no options about classes.

    Raises:
        ValueError: It gets one.
    """
    for name, value in given.items():
        if value:
            raise ValueError(f"{name} is {value!r}, but masked tokens have no class: leave it out.")


@dataclass(frozen=True)
class EvaluateOptions:
    """Options of `nystrom evaluate`.

    Attributes:
        task: Task, such as "listops".
        model: Folder of a saved model, such as RUN/best.
        data: Prepared data, or your own texts, as for `nystrom train`.
        text_field: Column of the texts, or of the first text of each pair, in your own files. Default: the usual names.
        label_field: Column of the labels in your own files.
        pair_field: Column of the second text of each pair, for retrieval.
        split: train, val or test.
        batch_size: Samples per batch; affects only speed and memory.
        precision: "auto" is bfloat16 autocast on an accelerator that has it, and float32 elsewhere.
        device: "auto" uses an accelerator if there is one.
    """

    task: str
    _: KW_ONLY
    model: Path
    data: Path
    text_field: str | None = None
    label_field: str | None = None
    pair_field: str | None = None
    split: str = "test"
    batch_size: int = 64
    precision: Precision = "auto"
    device: Device = "auto"


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
    return score(
        asked.task,
        Path(asked.model),
        Path(asked.data),
        columns=Columns(asked.text_field, asked.label_field, asked.pair_field),
        split=asked.split,
        batch_size=asked.batch_size,
        precision=precision,
        device=device,
    )
