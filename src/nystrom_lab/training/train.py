"""Train a model on a task, and score a saved one.

Everything that determines the result is settled and checked here; the data, the model and the Trainer follow in
`nystrom_lab.training.run.train_model`, which is imported only then, so that this module needs no torch. On the same
machine and with the same number of processes, a run that was killed and resumed ends with the weights and the curves of
one that was not; up to rounding with more than two processes, which add gradients in an order that is not fixed.
"""

from collections.abc import Mapping
from pathlib import Path

from nystrom.checks import check_at_least
from nystrom_lab.measure.rows import Row
from nystrom_lab.training.data.columns import Columns
from nystrom_lab.training.hardware import Device, Precision, is_main, usable_device, usable_precision
from nystrom_lab.training.lengths import data_positions, lengthened
from nystrom_lab.training.options import PresetChanges, RunOptions, taking
from nystrom_lab.training.presets.published import find_preset
from nystrom_lab.training.run.folder import RunFolder
from nystrom_lab.training.run_settings import settle


@taking(changes=PresetChanges, how=RunOptions)
def train(
    task: str,
    *,
    attention: str | None = None,
    options: Mapping[str, object] | None = None,
    preset: str | None = None,
    model: Path | None = None,
    mask_share: float = 0.0,
    data: Path | None = None,
    text_field: str | None = None,
    label_field: str | None = None,
    pair_field: str | None = None,
    max_length: int | None = None,
    to: Path | None = None,
    how: RunOptions,
    changes: PresetChanges,
    conv_kernel_size: int | None = None,
    compile: bool = False,
) -> Path:
    """Train a model on a task, choose its best checkpoint on the validation split, and score that on the test split.

    With `mask_share` the model learns to predict masked tokens of the task's own inputs in place of their class, and
    the test split is not read: `nystrom pretrain TASK`. Another run takes the encoder on with `model`.

    Arguments that are not given take the preset's values. Under torchrun the processes share each batch. A run can be
    interrupted at any time and continued with `resume`.

    Args:
        task: Task, such as "listops".
        attention: Method, a name of `nystrom methods`; or "none", values that pass through, to see what attention adds.
            That of the model, or nystrom.
        options: Options of the method.
        preset: "nystromformer" or "skyformer", as published, and "nystromformer-1000" or "skyformer-1000" for Text cut
            at 1,000 bytes; "official", that of the benchmark's own code; "modern", with what lifts attention since, or
            "modern-small", for one core; or "demo" for a few minutes on two cores. That of the model's run, or
            nystromformer.
        model: Encoder to start from, such as RUN/best of `nystrom pretrain TASK`: its settings and weights; the head
            is new.
        mask_share: Share of the tokens that are masked and predicted in place of the class; 0 to learn the class.
        data: Prepared data; data/TASK, or data/TASK-demo for the demo, which is made if it is missing and can be. A
            resumed run uses its own. For text also your own labelled texts (.csv, .tsv, .jsonl, or a folder of them),
            for retrieval your own pairs of texts; they are prepared under data/. For pathfinder pictures of any size:
            the model has a position for each pixel.
        text_field: Column of the texts, or of the first of each pair, in your own files; the usual names if not given.
        label_field: Column of the labels in your own files.
        pair_field: Column of the second text of each pair, for retrieval.
        max_length: Tokens of the longest sequence, and positions of the model, in place of the preset's; the default
            data are then data/TASK-LENGTH. Not for pictures, whose data have a size.
        to: Folder of the run; runs/TASK-ATTENTION-PRESET-seedSEED.
        **how: How it runs.
        **changes: What is changed in the preset.
        conv_kernel_size: Size of the convolution of the values that is added to the attention; 0 for none.
        compile: Compile the model, and pad every batch to the model's positions, so that one graph serves all steps.

    Returns:
        The folder of the run; the best model is in its folder best.

    Raises:
        ValueError: A name, number, folder, device or precision cannot be used; raised before data or model are made.
        FloatingPointError: The loss or a weight is no longer finite.
    """
    from nystrom_lab.training.data.tasks import check_data

    start = None
    if model is not None:
        from nystrom_lab.training.encoder_start import find_encoder

        start = find_encoder(Path(model))
    preset = preset or (start and start.preset) or "nystromformer"
    chosen = find_preset(task, preset) if max_length is None else lengthened(find_preset(task, preset), max_length)
    if mask_share:
        check_no_class(
            pooling=changes.pooling,
            pooled_norm=changes.pooled_norm,
            label_smoothing=changes.label_smoothing,
            denoise=changes.denoise,
        )
    shown = attention or ("nystrom" if start is None else start.config.attention)
    parts = ["pretrain"] if mask_share else []
    parts += [task, shown, preset, *(["pretrained"] if model else []), *([str(max_length)] if max_length else [])]
    run = RunFolder(Path("runs") / "-".join([*parts, f"seed{how.seed}"]) if to is None else Path(to))
    columns = Columns(text_field, label_field, pair_field)
    if data is None:
        columns.check_unused("no data are named with --data")
        data = run.data_folder()
    data = None if data is None else Path(data)
    check_data(task, data)
    settings = settle(
        task,
        how,
        attention=attention,
        options=options,
        conv_kernel_size=conv_kernel_size,
        preset=preset,
        changes=changes.asdict(),
        positions=data_positions(chosen, data) if max_length is None else max_length,
        compile=compile,
        mask_share=mask_share,
        start=start,
    )
    resume = run.is_resumed(how.resume)
    with run.held(settings, resume=resume, main=is_main()):
        from nystrom_lab.training.run.train_model import train_model

        train_model(
            settings, chosen, data, run, columns=columns, resume=resume, threads=how.threads, timeout=how.timeout
        )
    return run.path


def check_no_class(**given: object) -> None:
    """Check that nothing about classes is asked of a run that learns masked tokens.

    Raises:
        ValueError: Something is.
    """
    for name, value in given.items():
        if value:
            raise ValueError(f"{name} is {value!r}, but masked tokens have no class: leave it out.")


def evaluate(
    task: str,
    *,
    model: Path,
    data: Path,
    text_field: str | None = None,
    label_field: str | None = None,
    pair_field: str | None = None,
    split: str = "test",
    batch_size: int = 64,
    precision: Precision = "auto",
    device: Device = "auto",
) -> Row:
    """Score a saved model on all samples of one split.

    Args:
        task: Task, such as "listops".
        model: Folder of a saved model, such as RUN/best.
        data: Prepared data, or your own texts, as `train` takes them.
        text_field: Column of the texts, or of the first of each pair, in your own files; the usual names if not given.
        label_field: Column of the labels in your own files.
        pair_field: Column of the second text of each pair, for retrieval.
        split: train, val or test.
        batch_size: Samples at a time; affects only speed and memory.
        precision: "auto" is bfloat16 autocast on an accelerator that has it, and float32 elsewhere.
        device: "auto" is an accelerator where there is one.

    Returns:
        The accuracy as a row of `nystrom_lab.measure.rows`, between 0 and 1, with its 95 % interval.

    Raises:
        ValueError: A name, folder, device or precision that cannot be used, or a model of another task or of other
            classes.
    """
    check_at_least("batch_size", batch_size, 1)
    device = usable_device(device)  # pyright: ignore[reportAssignmentType]
    precision = usable_precision(precision, device)  # pyright: ignore[reportAssignmentType]

    from nystrom_lab.training.data.tasks import check_data
    from nystrom_lab.training.scoring import score

    check_data(task, Path(data))
    columns = Columns(text_field, label_field, pair_field)
    return score(
        task,
        Path(model),
        Path(data),
        columns=columns,
        split=split,
        batch_size=batch_size,
        precision=precision,
        device=device,
    )
