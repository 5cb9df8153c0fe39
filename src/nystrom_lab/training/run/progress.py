"""The progress output of a run: a line of plain numbers at each point of its curves.

On a terminal there is a bar below the lines; in a file or a pipe there are only the lines.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from transformers import ProgressCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.utils import logging

# What the Trainer logs, and its name in the curves and lines.
QUANTITIES = {
    "loss": "train loss",
    "eval_loss": "validation loss",
    "eval_accuracy": "validation accuracy",
    "learning_rate": "learning rate",
    "grad_norm": "gradient norm",
}


class ProgressLines(TrainerCallback):
    """Prints the lines.

    Args:
        quantities: Names in the lines of the logged values.
    """

    def __init__(self, quantities: Mapping[str, str] = QUANTITIES):
        self.quantities = quantities

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Print a line of the logged values."""
        if state.is_world_process_zero and (line := line_of(logs or {}, state, self.quantities)):
            print(line, flush=True)


class ProgressBar(ProgressCallback):
    """Draws the bar, and prints the lines above it.

    Args:
        quantities: Names in the lines of the logged values.
    """

    def __init__(self, quantities: Mapping[str, str] = QUANTITIES):
        super().__init__()
        self.quantities = quantities

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Print a line of the logged values."""
        if self.training_bar is not None and (line := line_of(logs or {}, state, self.quantities)):
            self.training_bar.write(line)


def progress(quantities: Mapping[str, str] = QUANTITIES) -> TrainerCallback:
    """The bar on a terminal, only the lines elsewhere."""
    return (ProgressBar if sys.stderr.isatty() and sys.stdout.isatty() else ProgressLines)(quantities)


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
            f"about {_duration(logs['seconds'] / state.global_step * (state.max_steps - state.global_step))} left"
        )
    if logs["megabytes"]:
        parts.append(f"peak memory {logs['megabytes']:.0f} MB")
    return f"step {state.global_step} of {state.max_steps}: {', '.join(parts)}"


def _duration(seconds: float) -> str:
    """A rounded number of seconds, minutes or hours."""
    unit, name = next(
        (unit, name) for unit, name in ((3600, "h"), (60, "min"), (1, "s")) if seconds >= 1.5 * unit or unit == 1
    )
    return f"{seconds / unit:.1f} {name}" if unit == 3600 else f"{seconds / unit:.0f} {name}"


def _part(name: str, value: float) -> str:
    return f"{name} {value:.1%}" if name.endswith(("accuracy", "F1")) else f"{name} {value:.4g}"
