"""Train a model on a task, and score a saved one.

Everything that determines the result is settled and checked here; the data, the model and the Trainer follow in
`nystrom_lab.training.run.start`, which is imported only then, so that this module needs no torch. On the same machine
and with the same number of processes, a run that was killed and resumed ends with the weights and the curves of one
that was not; up to rounding with more than two processes, which add gradients in an order that is not fixed.
"""

from collections.abc import Mapping
from pathlib import Path

from nystrom.checks import Design, FeedForward, PooledNormKind, Pooling, PositionKind, check_at_least
from nystrom_lab.measure.rows import Row
from nystrom_lab.training.data.columns import Columns
from nystrom_lab.training.hardware import TIMEOUT, Device, Precision, is_main, usable_device, usable_precision
from nystrom_lab.training.lengths import data_positions, lengthened
from nystrom_lab.training.presets.published import find_preset
from nystrom_lab.training.presets.recipe import LearningRateSchedule
from nystrom_lab.training.run.folder import RunFolder
from nystrom_lab.training.settings import settle


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
    seed: int = 0,
    resume: bool = False,
    steps: int | None = None,
    batch_size: int | None = None,
    accumulation: int = 1,
    context_parallel: int = 1,
    learning_rate: float | None = None,
    warmup_steps: int | None = None,
    dropout: float | None = None,
    conv_kernel_size: int | None = None,
    positions: PositionKind | None = None,
    rotary_share: float | None = None,
    rotary_across_heads: bool | None = None,
    short_conv_kernel_size: int | None = None,
    pooling: Pooling | None = None,
    pooled_norm: PooledNormKind | None = None,
    feed_forward: FeedForward | None = None,
    design: Design | None = None,
    drop_weights: bool | None = None,
    schedule: LearningRateSchedule | None = None,
    clip_norm: float | None = None,
    adam_betas: tuple[float, float] | None = None,
    weight_decay: float | None = None,
    label_smoothing: float | None = None,
    ema: float | None = None,
    augment: bool | None = None,
    denoise: float | None = None,
    evaluate_every: int | None = None,
    log_every: int | None = None,
    precision: Precision = "auto",
    device: Device = "auto",
    compile: bool = False,
    track_error: bool = False,
    threads: int | None = None,
    timeout: int = TIMEOUT,
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
        seed: Determines initial weights, order of the samples and dropout.
        resume: Continue the run in the folder, from its last complete checkpoint.
        steps: Steps.
        batch_size: Samples per step, over all processes and accumulated parts.
        accumulation: Parts in which a process computes its share of a batch, to save memory; in evaluations too.
        context_parallel: Processes that share the tokens of each sample, for samples that do not fit into one.
        learning_rate: Learning rate at the end of the warm-up.
        warmup_steps: Steps of linear warm-up.
        dropout: Dropout on the hidden states.
        conv_kernel_size: Size of the convolution of the values that is added to the attention; 0 for none.
        positions: "learned", a table; "rotary", queries and keys turned by their position; or "none".
        rotary_share: Share of the width that turns, of rotary positions.
        rotary_across_heads: The angles of rotary positions are spread over the heads, from local to global ones.
        short_conv_kernel_size: Size of the convolutions of queries, keys and values before the method; 0 for none.
        pooling: What the classification head reads of the tokens: "mean", "first", "max", or "cls", a learned token
            before the first.
        pooled_norm: "batch" brings each channel of that to mean 0 and variance 1 over the samples that a process
            computes at once; or "none".
        feed_forward: "plain", "gated" by the activation (GEGLU, SwiGLU), or "glu", gated by the sigmoid.
        design: Classification head, dropout and initial values as in "transformers", in the papers' code ("authors") or
            in the "official" code of the Long Range Arena.
        drop_weights: Drop weights of exact and kernelized attention, which are then stored, in the design "authors";
            other methods have none to drop.
        schedule: The learning rate after the warm-up: "linear" or "cosine" to 0, "constant", or "rsqrt", the inverse
            root of the step.
        clip_norm: Largest norm of the gradient of a step; 0 for any.
        adam_betas: Decay of AdamW's running means.
        weight_decay: Weight decay of AdamW, on all weights but biases and norms.
        label_smoothing: Share of a label that is spread evenly over the classes, in training.
        ema: Decay of a running mean of the weights, which is evaluated and kept in their place; 0 for none.
        augment: Vary training samples anew in each pass: the arguments of ListOps in another order, texts cropped,
            pictures mirrored, shifted and scaled (Pathfinder: mirrored).
        denoise: Weight of the loss of predicting every token of an input of which 30 % is corrupted; 0 for clean
            inputs.
        evaluate_every: Steps between evaluations, each followed by a checkpoint.
        log_every: Steps between points of the training curve; divides evaluate_every.
        precision: "auto" is bfloat16 autocast on an accelerator that has it, and float32 elsewhere.
        device: "auto" is an accelerator where there is one.
        compile: Compile the model, and pad every batch to the model's positions, so that one graph serves all steps.
        track_error: Also record the error of attention against exact attention, estimated from a few queries.
        threads: Threads on the CPU; torch's choice if not given.
        timeout: Seconds that a process waits for the others; then the run ends, and can be resumed.

    Returns:
        The folder of the run; the best model is in its folder best.

    Raises:
        ValueError: A name, number, folder, device or precision cannot be used; raised before data or model are made.
        FloatingPointError: The loss or a weight is no longer finite.
    """
    from nystrom_lab.training.data.tasks import check_data

    start = None
    if model is not None:
        from nystrom_lab.training.encoder_start import find_start

        start = find_start(Path(model))
    preset = preset or (start and start.preset) or "nystromformer"
    chosen = find_preset(task, preset) if max_length is None else lengthened(find_preset(task, preset), max_length)
    if mask_share:
        check_no_class(pooling=pooling, pooled_norm=pooled_norm, label_smoothing=label_smoothing, denoise=denoise)
    shown = attention or ("nystrom" if start is None else start.config.attention)
    parts = ["pretrain"] if mask_share else []
    parts += [task, shown, preset, *(["pretrained"] if model else []), *([str(max_length)] if max_length else [])]
    run = RunFolder(Path("runs") / "-".join([*parts, f"seed{seed}"]) if to is None else Path(to))
    columns = Columns(text_field, label_field, pair_field)
    if data is None:
        columns.check_unused("no data are named with --data")
        data = run.data_folder()
    data = None if data is None else Path(data)
    check_data(task, data)
    settings = settle(
        task,
        attention=attention,
        options=options,
        conv_kernel_size=conv_kernel_size,
        preset=preset,
        device=device,
        precision=precision,
        accumulation=accumulation,
        seed=seed,
        changes={
            "steps": steps,
            "batch_size": batch_size,
            "learning_rate": learning_rate,
            "warmup_steps": warmup_steps,
            "dropout": dropout,
            "evaluate_every": evaluate_every,
            "log_every": log_every,
            "positions": positions,
            "rotary_share": rotary_share,
            "rotary_across_heads": rotary_across_heads,
            "short_conv_kernel_size": short_conv_kernel_size,
            "pooling": pooling,
            "pooled_norm": pooled_norm,
            "feed_forward": feed_forward,
            "design": design,
            "drop_weights": drop_weights,
            "schedule": schedule,
            "clip_norm": clip_norm,
            "adam_betas": adam_betas,
            "weight_decay": weight_decay,
            "label_smoothing": label_smoothing,
            "ema": ema,
            "augment": augment,
            "denoise": denoise,
        },
        positions=data_positions(chosen, data) if max_length is None else max_length,
        compile=compile,
        track_error=track_error,
        mask_share=mask_share,
        start=start,
        context_parallel=context_parallel,
    )
    check_at_least("timeout", timeout, 1)
    if threads is not None:
        check_at_least("threads", threads, 1)
    resume = run.goes_on(resume)
    with run.held(settings, resume=resume, main=is_main()):
        from nystrom_lab.training.run.start import train_model

        train_model(settings, chosen, data, run, columns=columns, resume=resume, threads=threads, timeout=timeout)
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
