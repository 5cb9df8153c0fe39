"""The Hugging Face Trainer with the batches and rules of this library, for all kinds of runs.

- The Trainer's single "epoch" is the whole run: `TrainingOrder` yields the samples of all passes, so a resumed run
  skips to its place, and no boundary between passes depends on processes or accumulation. `state.epoch` still counts
  passes over the data.
- A loss or a logit that is not finite stops the run, and weights that are not finite are not written to a checkpoint.
- The curves contain the gradient norm of a step, before clipping.
- After each checkpoint the curves are rewritten from the Trainer's own log, which is part of a checkpoint: a step that
  ran twice, before and after an interruption, appears once.
- A checkpoint is written in a folder of its own first, see `nystrom_lab.training.run_folder`. One that cannot be
  written, on a full disk for example, ends the run with one line, and is removed.
- Before each evaluation, a head with a pooled norm gets its mean and variance from training samples, the same ones each
  time (`nystrom.models.parts.modern`).
- The best checkpoint is that of the evaluation with the largest "eval_selection"; each kind of run defines it.
- Evaluation uses the batch size of a gradient-accumulation step, so a model that fits in memory for training also fits
  for evaluation.

The pickled states that the Trainer (5.23) loads are those of the optimizer, the schedule, the scaler and the random
numbers, all with `weights_only=True`, which runs no code; weights are safetensors.
"""

import importlib.util
import math
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_pt_utils import safe_globals

from nystrom.models.parts.modern import pooled_norms
from nystrom.parallel import parallelize
from nystrom.whole_files import NotWritten
from nystrom_lab.config import Optimizer, Resolved
from nystrom_lab.measure.memory import peak_megabytes
from nystrom_lab.measure.rows import Row
from nystrom_lab.report.plots.curves import draw_curves
from nystrom_lab.training.batches import TrainingOrder, shortest_first
from nystrom_lab.training.finite import NotFinite, check_outputs
from nystrom_lab.training.hardware import LostRanks, is_main
from nystrom_lab.training.run_folder import Point, RunFolder, written
from nystrom_lab.training.run_progress import QUANTITIES, RunProgress
from nystrom_lab.whole_folders import whole_folder

S = TypeVar("S", bound=Resolved)
# Our names of schedules, and transformers'.
_SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant_with_warmup", "rsqrt": "inverse_sqrt"}
# Samples that the mean and variance of pooled tokens are measured on, at most.
MEASURED = 512
_REMEDY = "continue with --resume"


class RunResults(NamedTuple):
    """The results of a run.

    Attributes:
        rows: Scores as rows.
        row: Makes a row of a quantity, a value and a unit.
        text: The scores in words.
        files: Files besides the model and the rows, by what they are.
    """

    rows: Sequence[Row]
    row: Callable[[str, float, str], Row]
    text: str
    files: Mapping[str, object]


class RunTrainer(Trainer, Generic[S]):
    """Trains one model by settings, in one run folder.

    Args:
        arguments: From `training_arguments`.
        train: The training split, with the `lengths` of its samples.
        clip_value: Entries of a gradient are clipped to this size; None for no clipping.
        quantities: Names in the curves and the lines of the logged values.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        arguments: TrainingArguments,
        *,
        settings: S,
        train: Any,
        validation: Any,
        collate: Callable[..., dict[str, torch.Tensor]],
        run: RunFolder,
        clip_value: float | None = None,
        quantities: Mapping[str, str] = QUANTITIES,
        compute_metrics: Callable[..., dict[str, float]],
        preprocess_logits_for_metrics: Callable[..., Any] | None = None,
    ):
        judge = preprocess_logits_for_metrics
        self.pieces = None
        if settings.context_parallel > 1:
            from nystrom_lab.training.ranks import Pieces

            self.pieces = Pieces(settings.context_parallel, device=settings.device, timeout=arguments.ddp_timeout_delta)
            parallelize(model, self.pieces.tokens)
            collate = self.pieces.collate(collate)
        self.settings, self.run, self.clip_value, self.quantities = settings, run, clip_value, quantities
        self.train_samples, self.validation, self._collate = train, validation, collate
        self._seconds, self._since, self._megabytes = 0.0, time.monotonic(), 0.0
        self.network, self.gradient_norm = model, math.nan
        super().__init__(
            model=model,
            args=arguments,
            data_collator=collate,
            train_dataset=train,
            eval_dataset=validation,
            compute_metrics=compute_metrics,
            preprocess_logits_for_metrics=judge and (lambda logits, labels: judge(check_outputs(logits), labels)),
            callbacks=[RunCallback(self), RunProgress(quantities)],
        )
        # PrinterCallback prints numbers as quoted strings; RunProgress replaces it.
        self.remove_callback(PrinterCallback)

    def get_train_dataloader(self) -> DataLoader:
        """The batches of the whole run; each process takes its share of every batch."""
        return self._whole_run(self.train_dataset, partial(TrainingOrder, self.train_samples.lengths))

    def _whole_run(self, samples: Any, order: Callable[..., TrainingOrder]) -> DataLoader:
        settings = self.settings
        drawn = order(batch_size=settings.batch_size, steps=settings.steps, seed=settings.seed)
        return self._loader(samples, drawn, settings.part_size)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """The validation split, the shortest samples first."""
        assert eval_dataset in (None, self.eval_dataset), "other splits are scored after the run"
        return self._loader(self.eval_dataset, shortest_first(self.validation.lengths), self.args.eval_batch_size)

    def _loader(self, dataset: Any, order: Any, size: int) -> DataLoader:
        loader = DataLoader(
            dataset,
            batch_size=size,
            sampler=order,
            collate_fn=self._collate,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.settings.device != "cpu",
        )
        return self.accelerator.prepare(loader) if self.pieces is None else self.pieces.loader(loader, self.accelerator)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """One gradient-accumulation step; a loss that is not finite raises."""
        loss = super().training_step(*args, **kwargs)
        if not torch.isfinite(loss):
            raise NotFinite(f"the loss is {loss.item()} at step {self.state.global_step + 1} of {self.settings.steps}")
        return loss

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate on the validation split, and add the value that selects the best checkpoint."""
        if self.pieces is not None:
            # The Trainer's own would count each sample once for each of its pieces.
            self.gather_function = partial(self.pieces.gather, accelerator=self.accelerator)
        if pooled_norms(self.network):
            self.measure_pooled()
        metrics = super().evaluate(*args, **kwargs)
        if not math.isfinite(metrics["eval_loss"]):
            raise NotFinite(f"the validation loss is {metrics['eval_loss']} after step {self.state.global_step}")
        return {**metrics, "eval_selection": self.selection(metrics)}

    def selection(self, metrics: Mapping[str, float]) -> float:
        """The value that selects the best checkpoint."""
        return metrics["eval_selection"]

    def measure_pooled(self) -> None:
        """Measure the mean and variance of the head's norm on training samples, as evaluation sees them."""
        from nystrom_lab.training.pooled import measure_pooled

        size = self.args.eval_batch_size
        whole = size * self.settings.processes // self.settings.context_parallel
        # Whole batches for every process, of which none is filled up with samples that come twice.
        count = max(min(MEASURED, len(self.train_samples)) // whole, 1) * whole
        chosen = np.random.default_rng(self.settings.seed).permutation(len(self.train_samples))[:count]
        loader = self._loader(self.train_dataset, chosen.tolist(), size)
        measure_pooled(self.network, (self.prediction_step(self.network, batch, True) for batch in loader))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, with the time and memory of training so far; time lost in an interruption does not count."""
        if "loss" in logs:
            # A Trainer that clips by the norm logs the norm itself, from before the clipping.
            logs.setdefault("grad_norm", self.gradient_norm)
        logs |= {"seconds": self.seconds, "megabytes": self.megabytes}
        super().log(logs, start_time)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write a checkpoint, which gets its name in `RunCallback.on_save`, or none."""
        try:
            with written(self.run.checkpoint(self.state.global_step), self.remedy()):
                super()._save_checkpoint(model, trial)
        except NotWritten:
            self.run.clear_unfinished()
            raise

    def _get_output_dir(self, trial: Any) -> str:
        return str(self.run.unfinished)

    def remedy(self) -> str:
        """How to continue a run that could not write a file."""
        return f"continue with --resume, from step {self.run.last_step() or 0}"

    @property
    def seconds(self) -> float:
        """Seconds of training, evaluations and checkpoints included."""
        return self._seconds + time.monotonic() - self._since

    @property
    def megabytes(self) -> float:
        """The peak memory of this process in the run, see `nystrom_lab.measure.memory`."""
        return max(self._megabytes, peak_megabytes(self.settings.device))

    def restart_clock(self) -> None:
        """Start the clock, from the logged values and step of a resumed run."""
        logged = [entry for entry in self.state.log_history if "seconds" in entry]
        self._seconds, self._since = max((entry["seconds"] for entry in logged), default=0.0), time.monotonic()
        self._megabytes = max((entry["megabytes"] for entry in logged), default=0.0)

    def finish(self, command: str) -> None:
        """Score the best model, write its folder, predictions, curves and, last, the results, and print them.

        Ranks that share the samples of the process that writes call it together.

        Raises:
            OSError: A file could not be written; the message names it and how to continue.
        """
        run, step = self.run, self.state.best_global_step
        assert step, "the last step is evaluated, and counts"
        # Before the scoring; memory is 0 where it is not known.
        costs = (
            ("training time", self.seconds, "s"),
            ("best step", float(step), ""),
            ("steps", float(self.state.global_step), ""),
            ("peak memory", self.megabytes, "MB"),
        )
        model, scores = self.score_best(step)
        if not is_main():
            return
        with written(run.path, _REMEDY):
            run.write_curves(self.curves())
            draw_curves(run.curves, run.plot)
        with written(run.best, _REMEDY), whole_folder(run.best) as partial:
            self.save_best(model, partial)
        results = self.results(model, scores, command)
        with written(run.rows, _REMEDY):
            run.write_rows([*results.rows, *(results.row(*cost) for cost in costs if cost[1])])
        files = {"model": run.best, **results.files, "rows": run.rows}
        width = max(map(len, files))
        print(f"{results.text}; {costs[0][1]:.0f} s of training")
        print("\n".join(f"{name:{width}} {file}" for name, file in files.items()))

    def score_best(self, step: int) -> tuple[Any, Any]:
        """The model after the best step, and its scores."""
        raise NotImplementedError

    def save_best(self, model: Any, folder: Path) -> None:
        """Save the best model in a folder."""
        model.save_pretrained(folder)

    def results(self, model: Any, scores: Any, command: str) -> "RunResults":
        """The results of the best model."""
        raise NotImplementedError

    def logged_at(self, step: int) -> dict[str, float]:
        """The scores of the evaluation after a step, the last one if there were several."""
        return [entry for entry in self.state.log_history if entry["step"] == step and "eval_loss" in entry][-1]

    def curves(self) -> list[Point]:
        """The curves so far."""
        return [
            Point(int(entry["step"]), quantity, float(entry[name]), float(entry["seconds"]))
            for entry in self.state.log_history
            for name, quantity in self.quantities.items()
            if name in entry
        ]


class RunCallback(TrainerCallback):
    """Actions between the steps."""

    def __init__(self, trainer: RunTrainer):
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start the clock, and give each process its own dropout."""
        self.trainer.restart_clock()
        if args.world_size > 1:
            # With one seed, all processes would drop the same units. A resumed run loads its own state after this.
            torch.manual_seed(self.trainer.settings.seed + args.process_index)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Record the gradient norm if the step is logged, and clip the gradient by value if the run does."""
        if not args.max_grad_norm:
            # Once a step, where a clip by norm has not done it.
            self.trainer.accelerator.unscale_gradients()
        step = state.global_step + 1
        if step % args.logging_steps == 0 or step >= self.trainer.settings.steps:
            grads = [weight.grad for weight in self.trainer.network.parameters() if weight.grad is not None]
            self.trainer.gradient_norm = float(nn.utils.get_total_norm(grads))
        if (clip := self.trainer.clip_value) is not None:
            nn.utils.clip_grad_value_(self.trainer.network.parameters(), clip)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count passes over the data, and check the weights before they are saved."""
        trainer = self.trainer
        state.epoch = state.global_step * trainer.settings.batch_size / len(trainer.train_samples)
        if state.global_step >= trainer.settings.steps:
            control.should_log = True
        if control.should_save:
            for name, weight in trainer.network.named_parameters():
                if not torch.isfinite(weight).all():
                    raise NotFinite(f"{name} holds numbers that are not finite after step {state.global_step}")

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Complete the checkpoint once every process has written its part."""
        self.trainer.accelerator.wait_for_everyone()
        if state.is_world_process_zero:
            run = self.trainer.run
            with written(run.path, self.trainer.remedy()):
                run.complete(state.global_step)
                run.prune(last=state.global_step, best=state.best_global_step)
                run.write_curves(self.trainer.curves())


def training_arguments(
    settings: Resolved,
    optimizer: Optimizer,
    run: RunFolder,
    *,
    adam_epsilon: float,
    workers: int = 0,
    reports: Sequence[str] | None = None,
) -> TrainingArguments:
    """The settings as arguments of the Trainer.

    Args:
        optimizer: Further settings of AdamW and the learning rate.
        adam_epsilon: Added to the root of the second mean of AdamW.
        workers: Processes that make batches ahead; 0 for only this one.
        reports: Reporting integrations of the Trainer. Default: TensorBoard, where it is installed.
    """
    if reports is None:
        reports = ["tensorboard"] if importlib.util.find_spec("tensorboard") else []
    if settings.processes > 1:
        from nystrom_lab.training.ranks import connect

        connect(settings.device, timedelta(seconds=settings.timeout))
    arguments = TrainingArguments(
        output_dir=str(run.path),
        max_steps=settings.steps,
        per_device_train_batch_size=settings.part_size,
        per_device_eval_batch_size=settings.part_size,
        gradient_accumulation_steps=settings.accumulation,
        learning_rate=settings.learning_rate,
        lr_scheduler_type=_SCHEDULES[optimizer.schedule],
        # Without a warm-up the inverse root is that of the step; transformers would take the root of 10,000 steps more.
        lr_scheduler_kwargs={"timescale": max(settings.warmup_steps, 1)} if optimizer.schedule == "rsqrt" else {},
        warmup_steps=settings.warmup_steps,
        optim="adamw_torch_fused",
        adam_beta1=optimizer.adam_betas[0],
        adam_beta2=optimizer.adam_betas[1],
        adam_epsilon=adam_epsilon,
        weight_decay=optimizer.weight_decay,
        max_grad_norm=optimizer.clip_norm,
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
        ddp_timeout=settings.timeout,
        ddp_find_unused_parameters=False,
        bf16=settings.precision == "bfloat16",
        fp16=settings.precision == "float16",
        remove_unused_columns=False,
        label_names=["labels"],
        disable_tqdm=True,
        dataloader_num_workers=workers,
        report_to=list(reports),
    )
    # With several accelerators and one process the Trainer would multiply the batch by their number (DataParallel).
    arguments._n_gpu = min(arguments.n_gpu, 1)
    return arguments


def run_to_the_end(trainer: RunTrainer, *, resume: bool, command: str, score: bool = True) -> None:
    """Train to the last step, from the last complete checkpoint if there is one, and finish.

    Args:
        trainer: The trainer, whose folder this process has locked.
        score: Whether the best model is scored and saved.

    Raises:
        ValueError: There are checkpoints, but none to continue from, or a file of one would run code.
        FloatingPointError: The loss or a weight is no longer finite.
        OSError: A file could not be written, or other processes were lost; the message names the folder, or them, and
            how to continue.
    """
    run, settings = trainer.run, trainer.settings
    step, damage = (run.last_step(), run.damage()) if resume else (None, [])
    if damage and step is None:
        faults = "; ".join(f"{checkpoint.name}: {what}" for checkpoint, what in damage)
        raise ValueError(
            f"{run.path} has no checkpoint to continue from ({faults}): put one back from a copy, or move them to "
            "another folder to start at step 1."
        )
    trainer.accelerator.wait_for_everyone()
    if is_main():
        for checkpoint, what in damage:
            print(f"warning: {checkpoint} is skipped: {what}.", flush=True)
        run.clear_unfinished()
        if resume:
            none = "There is no complete checkpoint yet: starting at step 1."
            print(f"Continuing after step {step}." if step else none, flush=True)
    trainer.accelerator.wait_for_everyone()
    try:
        with _naming_lost_ranks(trainer, lambda: f"in step {trainer.state.global_step + 1}"):
            trainer.train(resume_from_checkpoint=None if step is None else str(run.checkpoint(step)))
    except NotFinite as error:
        good = run.last_step()
        where = f"the last good checkpoint is {run.checkpoint(good)}" if good else "there is no checkpoint before it"
        raise NotFinite(
            f"{error}; {where}. Start another run with a lower --learning-rate"
            f"{'' if settings.precision == 'float32' else ' or with --precision float32'}."
        ) from error
    except pickle.UnpicklingError as error:
        assert step is not None, "only a checkpoint is unpickled"
        checkpoint = run.checkpoint(step)
        raise ValueError(
            f"{_refused(checkpoint)} holds pickled code, which is never run ({str(error).partition('. ')[0]}): delete "
            f"{checkpoint} and start the same command again, which continues from the checkpoint before it."
        ) from error
    except (NotWritten, LostRanks):
        raise
    except OSError as error:
        raise OSError(
            f"{run.path} stopped in step {trainer.state.global_step + 1} ({error}): {trainer.remedy()}."
        ) from error
    except KeyboardInterrupt:
        if is_main():
            print(
                f"\nStopped in step {trainer.state.global_step + 1} of {settings.steps}; continue with --resume, "
                f"from step {run.last_step() or 0}."
            )
        raise
    with _naming_lost_ranks(trainer, lambda: "while it scored"):
        if score and (is_main() or (trainer.pieces is not None and trainer.pieces.with_main)):
            trainer.finish(command)


def _naming_lost_ranks(trainer: RunTrainer, where: Callable[[], str]) -> AbstractContextManager[None]:
    if trainer.settings.processes == 1:
        return nullcontext()
    from nystrom_lab.training.ranks import naming_lost_ranks

    return naming_lost_ranks(where, trainer.remedy)


def _refused(checkpoint: Path) -> Path:
    """The file of a checkpoint that is rejected because it would run code; the folder if it is not a single file."""
    for file in sorted(checkpoint.glob("*.pt*")):
        try:
            with safe_globals():
                torch.load(file, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError:
            return file
    return checkpoint
