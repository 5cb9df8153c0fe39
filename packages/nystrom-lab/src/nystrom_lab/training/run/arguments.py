"""The settings of a run as arguments of the Trainer."""

from datetime import timedelta
from typing import NamedTuple, Protocol

from transformers import TrainingArguments

from nystrom_lab.training.hardware import TIMEOUT
from nystrom_lab.training.presets.recipe import LearningRateSchedule
from nystrom_lab.training.ranks.lost import connect
from nystrom_lab.training.run.folder import RunFolder
from nystrom_lab.training.schedule import RunSettings

# By their names in transformers.
_SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant_with_warmup",
    "rsqrt": "inverse_sqrt",
}


class Optimization(Protocol):
    """Settings of AdamW that a user does not choose."""

    @property
    def adam_betas(self) -> tuple[float, float]:
        """Decay of the running means."""
        ...

    @property
    def adam_epsilon(self) -> float:
        """Added to the root of the second mean."""
        ...

    @property
    def weight_decay(self) -> float:
        """Weight decay."""
        ...


class AdamValues(NamedTuple):
    """Settings of AdamW besides its learning rate; see `Optimization`."""

    adam_betas: tuple[float, float]
    adam_epsilon: float
    weight_decay: float


def training_arguments(
    settings: RunSettings,
    preset: Optimization,
    run: RunFolder,
    *,
    reports: list[str],
    schedule: LearningRateSchedule = "linear",
    clip_norm: float = 0.0,
    workers: int = 0,
    timeout: int = TIMEOUT,
) -> TrainingArguments:
    """The settings as arguments of the Trainer.

    Args:
        settings: Settings of the run.
        preset: Further settings of AdamW.
        run: The folder.
        reports: Further reporting integrations of the Trainer.
        schedule: Learning-rate schedule after the linear warm-up.
        clip_norm: Gradients are clipped to this norm; 0 for no clipping.
        workers: Processes that make batches ahead; 0 for only this one.
        timeout: Seconds to wait for the other processes.
    """
    if settings.processes > 1:
        connect(settings.device, timedelta(seconds=timeout))
    arguments = TrainingArguments(
        output_dir=str(run.path),
        max_steps=settings.steps,
        per_device_train_batch_size=settings.part_size,
        per_device_eval_batch_size=settings.part_size,
        gradient_accumulation_steps=settings.accumulation,
        learning_rate=settings.learning_rate,
        lr_scheduler_type=_SCHEDULES[schedule],
        # Without a warm-up the inverse root is that of the step; transformers would take the root of 10,000 steps more.
        lr_scheduler_kwargs={"timescale": max(settings.warmup_steps, 1)} if schedule == "rsqrt" else {},
        warmup_steps=settings.warmup_steps,
        optim="adamw_torch_fused",
        adam_beta1=preset.adam_betas[0],
        adam_beta2=preset.adam_betas[1],
        adam_epsilon=preset.adam_epsilon,
        weight_decay=preset.weight_decay,
        max_grad_norm=clip_norm,
        seed=settings.seed,
        eval_strategy="steps",
        eval_steps=settings.evaluate_every,
        save_strategy="steps",
        save_steps=settings.evaluate_every,
        logging_steps=settings.log_every,
        logging_nan_inf_filter=False,
        metric_for_best_model="selection",
        greater_is_better=True,
        use_cpu=settings.device == "cpu",
        # Naming a backend makes accelerate look for other processes.
        ddp_backend="gloo" if settings.device == "cpu" and settings.processes > 1 else None,
        ddp_timeout=timeout,
        ddp_find_unused_parameters=False,
        bf16=settings.precision == "bfloat16",
        fp16=settings.precision == "float16",
        remove_unused_columns=False,
        label_names=["labels"],
        disable_tqdm=True,
        dataloader_num_workers=workers,
        report_to=reports,
    )
    # With several accelerators and one process the Trainer would multiply the batch by their number (DataParallel).
    arguments._n_gpu = min(arguments.n_gpu, 1)
    return arguments
