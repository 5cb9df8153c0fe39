"""The progress output of a run: a line of plain numbers at each point of its curves.

Between them `nystrom.progress` says how far it is: on a terminal by a bar below the lines.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from transformers import TrainerCallback, TrainerState
from transformers.trainer_utils import has_length
from transformers.utils import logging

from nystrom.progress import Progress, duration


def logged_with(**scores: str) -> Mapping[str, str]:
    """The quantities that the Trainer logs, with these scores of an evaluation, and their names in curves and lines."""
    rest = {"learning_rate": "learning rate", "grad_norm": "gradient norm"}
    return {"loss": "train loss", "eval_loss": "validation loss", **scores, **rest}


QUANTITIES = logged_with(eval_accuracy="validation accuracy")


class RunProgress(TrainerCallback):
    """Shows the steps, and the batches of an evaluation, and prints the lines.

    Args:
        quantities: Names in the lines of the logged values.
    """

    def __init__(self, quantities: Mapping[str, str] = QUANTITIES):
        self.quantities = quantities
        self._steps: Progress | None = None
        self._batches: Progress | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin with the steps that are left."""
        if state.is_world_process_zero:
            self._steps = Progress("training", state.max_steps, unit="steps", initial=state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count a step."""
        if self._steps is not None:
            self._steps.update(state.global_step - self._steps.done)

    def on_prediction_step(self, args: Any, state: Any, control: Any, eval_dataloader: Any = None, **_: Any) -> None:
        """Count a batch of an evaluation."""
        if state.is_world_process_zero and has_length(eval_dataloader):
            if self._batches is None:
                self._batches = Progress("validation", len(eval_dataloader), unit="batches")
            self._batches.update()

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End an evaluation."""
        if self._batches is not None:
            self._batches.close()
            self._batches = None

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, float] | None = None, **_: Any) -> None:
        """Print a line of the logged values."""
        if state.is_world_process_zero and (line := line_of(logs or {}, state, self.quantities)):
            if self._steps is None:
                print(line, flush=True)
            else:
                self._steps.print(line)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End what is shown."""
        if self._steps is not None:
            self._steps.close()
            self._steps = None


@contextmanager
def no_file_bars() -> Iterator[None]:
    """Silence the bar that transformers draws for each file; the bars of the steps are not among them."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@contextmanager
def no_load_report() -> Iterator[None]:
    """Silence transformers' report of new heads; `EncoderPreTrainedModel` checks all other weights."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def line_of(logs: Mapping[str, float], state: TrainerState, quantities: Mapping[str, str] = QUANTITIES) -> str:
    """A line such as "step 20 of 700: train loss 2.301, learning rate 0.0004, 12 s, about 7 min left"."""
    parts = [_part(name, logs[key]) for key, name in quantities.items() if key in logs]
    if not parts:
        return ""
    parts.append(f"{logs['seconds']:.0f} s")
    if 0 < state.global_step < state.max_steps:
        # At the pace of the steps until now, their scoring included.
        parts.append(
            f"about {duration(logs['seconds'] / state.global_step * (state.max_steps - state.global_step))} left"
        )
    if logs["megabytes"]:
        parts.append(f"peak memory {logs['megabytes']:.0f} MB")
    return f"step {state.global_step} of {state.max_steps}: {', '.join(parts)}"


def _part(name: str, value: float) -> str:
    return f"{name} {value:.1%}" if name.endswith(("accuracy", "F1")) else f"{name} {value:.4g}"
