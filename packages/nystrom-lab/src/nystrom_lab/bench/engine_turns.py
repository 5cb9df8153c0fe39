"""Steps of the training engine and of a bare loop in turn, on copies of one model and the same batches."""

import copy
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import (
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import IntervalStrategy

from nystrom.checks import check_at_least
from nystrom.interleaved_timing import quartiles
from nystrom.models import EncoderConfig
from nystrom.progress import Progress
from nystrom_lab.bench.training_step import TrainingStep
from nystrom_lab.config import Device, Precision, TrainOptions
from nystrom_lab.measure.rows import Row, append_rows, check_rows
from nystrom_lab.training.arena import EncoderTrainer
from nystrom_lab.training.data.batches import TrainingOrder
from nystrom_lab.training.data.tasks import (
    Splits,
    check_data,
    class_names,
    default_folder,
    find_task,
    open_splits,
    prepare_if_missing,
)
from nystrom_lab.training.lengths import data_positions
from nystrom_lab.training.presets import Preset, find_preset
from nystrom_lab.training.results import Place, result_row, setting_facts
from nystrom_lab.training.run.folder import RunFolder
from nystrom_lab.training.run.progress import RunProgress
from nystrom_lab.training.run.run_trainer import training_arguments
from nystrom_lab.training.run_settings import Settings, settle

# Steps before the measured ones: memory is allocated, kernels are chosen.
_WARM_UP = 5


def measure_turns(
    task: str,
    *,
    to: Path,
    attention: str,
    preset: str,
    data: Path | None,
    steps: int,
    seed: int,
    precision: Precision,
    device: Device,
    threads: int | None,
) -> list[Row]:
    """Measure the engine and the bare loop; for the arguments see `nystrom_lab.bench.overhead.run_overhead`."""
    base, whole = find_preset(task, preset), steps + _WARM_UP
    check_data(task, data)
    settings = settle(
        TrainOptions(
            task,
            device=device,
            precision=precision,
            seed=seed,
            attention=attention,
            preset=preset,
            steps=whole,
            warmup_steps=0,
        ),
        positions=data_positions(base, data),
    )
    check_rows(to / "overhead.csv")
    if threads is not None:
        check_at_least("threads", threads, 1)
        torch.set_num_threads(threads)
    folder = default_folder(base.data) if data is None else data
    prepare_if_missing(task, folder, base.data)
    splits = open_splits(task, folder, positions=settings.longest, batch_size=settings.batch_size)
    set_seed(seed)
    config = settings.encoder_config(class_names(splits.train))
    with tempfile.TemporaryDirectory() as place:
        run = RunFolder(Path(place))
        arguments = training_arguments(settings, base, run, adam_epsilon=base.adam_epsilon, reports=[])
        arguments.eval_strategy = arguments.save_strategy = IntervalStrategy.NO
        model = find_task(task).model(config)
        bare = BareLoop(copy.deepcopy(model), settings, base, splits)
        trainer = EncoderTrainer(model, arguments, settings=settings, splits=splits, run=run)
        turns = _Turns(bare, whole)
        trainer.remove_callback(RunProgress)
        trainer.add_callback(turns)
        trainer.train()
    rows = _rows(task, config, settings, turns)
    append_rows(to / "overhead.csv", rows)
    return rows


class BareLoop:
    """The loop that a user would write by hand.

    Args:
        model: The model; it is moved to the device.
        settings: Settings of the run.
        preset: The preset that they come from.
        splits: Data.
    """

    def __init__(self, model: nn.Module, settings: Settings, preset: Preset, splits: Splits):
        self.device, model = settings.device, model.to(settings.device)
        optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=settings.learning_rate,
            betas=preset.adam_betas,
            eps=preset.adam_epsilon,
            weight_decay=preset.weight_decay,
            fused=True,
        )
        self.training = TrainingStep(model, optimizer, precision=settings.precision, clip_value=preset.clip_value)
        steps = settings.steps
        self.schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (steps - step) / steps)
        order = TrainingOrder(splits.train.lengths, batch_size=settings.batch_size, steps=steps, seed=settings.seed)
        loader = DataLoader(
            splits.train,  # pyright: ignore[reportArgumentType] (a dataset by its methods)
            batch_size=settings.batch_size,
            sampler=order,
            # The same lengths as in the engine, so that both have the same work.
            collate_fn=partial(find_task(settings.task).collate, most=settings.longest),
            pin_memory=settings.device != "cpu",
        )
        self.batches = iter(loader)

    def load(self) -> dict[str, Tensor]:
        """The next batch, on the device."""
        return {name: value.to(self.device, non_blocking=True) for name, value in next(self.batches).items()}

    def step(self, batch: dict[str, Tensor]) -> float:
        """Take one step, and return the loss."""
        loss = self.training.step(batch)
        self.schedule.step()
        # A loop that reports its loss reads it here.
        return float(loss)


class _Turns(TrainerCallback):
    """Takes a step of the bare loop after each step of the engine.

    Args:
        bare: The bare loop.
        steps: Steps that each of the two takes.
    """

    def __init__(self, bare: BareLoop, steps: int):
        self.bare, self.bar = bare, Progress("turns", steps)
        self.engine: list[float] = []
        self.hand: list[float] = []
        self.loading: list[float] = []
        self.since = 0.0

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Start the engine's clock."""
        self.since = self._now()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Stop the engine's clock while the bare loop takes its step."""
        end = self._now()
        batch = self.bare.load()
        loaded = self._now()
        self.bare.step(batch)
        stepped = self._now()
        if state.global_step > _WARM_UP:
            self.engine.append(end - self.since)
            self.loading.append(loaded - end)
            self.hand.append(stepped - end)
        self.bar.update()
        self.since = self._now()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Close the bar."""
        self.bar.close()

    def _now(self) -> float:
        if self.bare.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def _rows(task: str, config: EncoderConfig, settings: Settings, turns: _Turns) -> list[Row]:
    place = Place(
        device=settings.device, precision=settings.precision, seed=settings.seed, facts=setting_facts(settings)
    )
    ratios = [engine / hand for engine, hand in zip(turns.engine, turns.hand, strict=True)]
    shares = [loading / hand for loading, hand in zip(turns.loading, turns.hand, strict=True)]
    measured: tuple[tuple[str, Sequence[float], str, float], ...] = (
        ("engine step time", turns.engine, "ms", 1e3),
        ("bare step time", turns.hand, "ms", 1e3),
        ("loading time", turns.loading, "ms", 1e3),
        ("engine step / bare step", ratios, "", 1.0),
        ("loading / bare step", shares, "", 1.0),
    )
    rows = []
    for quantity, values, unit, factor in measured:
        found = quartiles([factor * value for value in values])
        row = result_row(
            config,
            f"{task} {quantity}",
            found.middle,
            unit,
            place,
            spread=found.spread,
            repeats=len(values),
            study="overhead",
            facts={"b": settings.batch_size, "threads": torch.get_num_threads()},
        )
        rows.append(row)
    return rows
