"""The trainer of healings: what it measures, when it stops, what it keeps and what it reports."""

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import EvalPrediction, TrainerCallback

from nystrom.attention.method_names import sized_name
from nystrom.integrations.saving import save_with_attention
from nystrom.models.files.folder import write_card
from nystrom.sums import CARD
from nystrom.whole_files import write_whole
from nystrom_lab.config import Optimizer
from nystrom_lab.measure.rows import Row, cpu_name
from nystrom_lab.report.plots.curves import draw_over_minutes
from nystrom_lab.training.finetune.finetune_settings import ADAM_EPSILON, model_name
from nystrom_lab.training.heal_settings import HealSettings
from nystrom_lab.training.heal_texts import Samples
from nystrom_lab.training.healing import Healing
from nystrom_lab.training.run_folder import RunFolder, state_of
from nystrom_lab.training.run_trainer import RunResults, RunTrainer, training_arguments

OPTIMIZER = Optimizer(schedule="linear", clip_norm=1.0, adam_betas=(0.9, 0.999), weight_decay=0.0)
# In the configuration of a healed model: the name of the model that it learned from.
HEALED = "healed_from"
# Measurements without a new best, after which a run stops.
_PATIENCE = 3


class HealTrainer(RunTrainer[HealSettings]):
    """The trainer of healings; the error of the held-out texts selects the best checkpoint.

    Args:
        healing: The models.
        settings: Settings of the run.
        made: Folder of the conversion.
        train: The texts to learn from.
        held_out: The others.
        collate: Makes a batch.
        run: The folder.
    """

    def __init__(
        self,
        healing: Healing,
        settings: HealSettings,
        made: Path,
        train: Samples,
        held_out: Samples,
        collate: Callable[..., dict[str, Tensor]],
        run: RunFolder,
    ):
        self.healing, self.made = healing, made
        arguments = training_arguments(settings, OPTIMIZER, run, adam_epsilon=ADAM_EPSILON)
        arguments.eval_on_start = not run.is_started or run.last_step() is None
        super().__init__(
            healing,  # pyright: ignore[reportArgumentType] (a module with the models in it)
            arguments,
            settings=settings,
            train=train,
            validation=held_out,
            collate=collate,
            run=run,
            quantities={
                "loss": "train loss",
                "eval_error": "held-out error",
                "eval_distance": healing.distance,
                "learning_rate": "learning rate",
            },
            compute_metrics=_scored,
        )
        self.add_callback(_Stop(settings))

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *_: Any, **__: Any) -> Any:
        """The loss of the stage."""
        return model(**inputs, whole=self.state.global_step >= self.settings.layer_steps)["loss"]

    def prediction_step(self, model: nn.Module, inputs: dict[str, Any], *_: Any, **__: Any) -> Any:
        """The errors of a batch of held-out texts."""
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            errors = self.healing.errors(inputs["input_ids"], inputs["attention_mask"])
        errors = torch.stack(errors, dim=1).float()
        return errors[:, 0].mean(), errors, errors[:, 0]

    def score_best(self, step: int) -> tuple[Any, Any]:
        """The model after the best step, and its errors before and after."""
        self.healing.load_state_dict(load_file(self.run.checkpoint(step) / "model.safetensors"))
        return self.healing.healed(), self.reached()

    def reached(self) -> "Healed":
        """The errors before, and after the best step."""
        before, after = (
            Score(logged["eval_error"], logged["eval_distance"])
            for logged in (self.logged_at(0), self.logged_at(self.state.best_global_step or 0))
        )
        return Healed(before, after, self.seconds, self.state.global_step)

    def save_best(self, model: Any, folder: Path) -> None:
        """Save the healed model, or the conversion as it came where that is nearer to the exact model."""
        shutil.copytree(self.made, folder, dirs_exist_ok=True)
        healed = self.reached()
        if healed.is_better:
            setattr(model.config, HEALED, model_name(str(self.settings.source)))
            save_with_attention(model, folder)
        write_card(folder)
        card = folder / CARD
        text = card.read_text(encoding="utf-8") if card.is_file() else ""
        write_whole(card, f"{text}\n{self._told(healed)}")

    def _told(self, healed: "Healed") -> str:
        """The healing's part of the model card."""
        settings, texts = self.settings, ", ".join(path.name for path in self.settings.texts)
        return (
            "## Healed\n\n"
            f"Its attention ({sized_name(settings.attention, settings.options)[0]}) learned from the exact model, "
            f"{model_name(str(settings.source))}, on up to {len(self.train_samples)} texts of {settings.shortest} to "
            f"{settings.length} tokens ({texts}), in {healed.steps} steps of {settings.batch_size} and "
            f"{healed.seconds / 60:.1f} minutes. What learned: {settings.learn}.\n\n"
            f"{healed.told(self.healing.distance)}, on {len(self.validation)} held-out texts.\n"
        )

    def results(self, model: Any, scores: Any, command: str) -> RunResults:
        """The errors before and after."""
        settings, config = self.settings, self.healing.student.config
        name, size = sized_name(settings.attention, settings.options)

        def row(quantity: str, value: float, unit: str = "", **more: Any) -> Row:
            return Row(
                study="heal",
                quantity=quantity,
                method=name,
                value=value,
                unit=unit,
                n=settings.length,
                m=size,
                facts={
                    "model": model_name(str(settings.source)),
                    "fingerprint": settings.fingerprint,
                    "layers": getattr(config, "num_hidden_layers", None),
                    "width": getattr(config, "hidden_size", None),
                    "heads": getattr(config, "num_attention_heads", None),
                    "batch_size": settings.batch_size,
                    "learning_rate": settings.learning_rate,
                    "learn": settings.learn,
                    "whole": settings.whole,
                },
                dtype=settings.precision,
                seed=settings.seed,
                device=torch.cuda.get_device_name() if settings.device == "cuda" else cpu_name(),
                command=command,
                **more,
            )

        texts = len(self.validation)
        rows = [
            row(f"{what} {when}", value, repeats=texts)
            for when, score in (("before", scores.before), ("after", scores.after))
            for what, value in (("held-out error", score.error), (self.healing.distance, score.distance))
        ]
        said = scores.told(self.healing.distance)
        if not scores.is_better:
            said += "; the healed model is not nearer to the exact one, so the conversion is kept as it came"
        figure = self.run.path / "error.png"
        draw_over_minutes(self.run.curves, figure, "held-out error")
        files = {**self.run.drawn, "error": figure}
        # On a busy machine minutes say little. After an interruption this is the time of the last process alone.
        rows.append(row("processor time", time.process_time(), "s"))
        return RunResults(rows, row, f"{said} (best after step {self.state.best_global_step})", files)


class Score(NamedTuple):
    """The mean errors over the held-out texts; see `Errors`."""

    error: float
    distance: float


class Healed(NamedTuple):
    """The results of a healing.

    Attributes:
        before: Score of the conversion.
        after: Score of the best checkpoint.
        seconds: Seconds of training, with the measurements.
        steps: How many steps there were.
    """

    before: Score
    after: Score
    seconds: float
    steps: int

    @property
    def is_better(self) -> bool:
        """Whether both errors are smaller than before."""
        return self.after.error < self.before.error and self.after.distance <= self.before.distance

    def told(self, distance: str) -> str:
        """The errors in words."""
        kept = "" if self.is_better else ", not kept"
        return (
            f"Error of the last hidden states {self.before.error:.3g} before, {self.after.error:.3g} after; {distance} "
            f"{self.before.distance:.3g} before, {self.after.distance:.3g} after{kept}"
        )


class _Stop(TrainerCallback):
    """Ends a run whose held-out error has stopped falling.

    Args:
        settings: Settings of the run.
    """

    def __init__(self, settings: HealSettings):
        self.settings = settings

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop after measurements of the last stage without a new best."""
        if _has_stopped(state.log_history, self.settings.before_last_stage):
            control.should_training_stop = True


def _has_stopped(logged: Sequence[Mapping[str, float]], before: int) -> bool:
    """Whether the last measurements, all of the last stage, brought no new best."""
    errors = [(entry["step"], entry["eval_error"]) for entry in logged if "eval_error" in entry]
    last, earlier = errors[-_PATIENCE:], errors[:-_PATIENCE]
    if not earlier or any(step <= before for step, _ in last):
        return False
    return min(error for _, error in last) >= min(error for _, error in earlier)


def stopped_after(run: RunFolder, before: int) -> int | None:
    """The step after which a run had stopped; None if it goes on."""
    step = run.last_step()
    logged = [] if step is None else state_of(run.checkpoint(step)).get("log_history", [])
    return step if _has_stopped(logged, before) else None


def _scored(prediction: EvalPrediction) -> dict[str, float]:
    errors: NDArray[Any] = np.asarray(prediction.predictions)
    error, distance = errors.mean(axis=0).tolist()
    return {"error": error, "distance": distance, "selection": -error}
