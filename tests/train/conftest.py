"""A small data set, and runs of a few steps on it."""

import csv
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook
from torch.optim import AdamW
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from nystrom.models import EncoderForSequenceClassification
from nystrom.train.engine import train
from nystrom.train.run.trainer import EncoderTrainer


@pytest.fixture(scope="session")
def small_run(data) -> Callable[..., Path]:
    """A run of twelve steps of eight samples, a checkpoint every three."""

    def run(to: Path, task: str = "listops", **changes) -> Path:
        settings = {"attention": "nystrom", "options": {"num_landmarks": 8}, "preset": "demo", "data": data, "to": to}
        settings |= {
            "steps": 12,
            "warmup_steps": 2,
            "batch_size": 8,
            "evaluate_every": 3,
            "log_every": 1,
            "device": "cpu",
        }
        return train(task, **(settings | changes))

    return run


@pytest.fixture(scope="session")
def whole(tmp_path_factory, small_run) -> Path:
    """An unbroken run, with dropout; tests look at it and change nothing."""
    return small_run(tmp_path_factory.mktemp("whole") / "run")


@pytest.fixture(scope="session")
def weights() -> Callable[..., dict[str, Tensor]]:
    """Read the weights of a run after a step."""

    def read(run: Path, step: int = 12) -> dict[str, Tensor]:
        return load_file(run / f"checkpoint-{step}" / "model.safetensors")

    return read


@pytest.fixture(scope="session")
def curves() -> Callable[[Path], list[tuple[int, str, float]]]:
    """Read the curves of a run."""

    def read(run: Path) -> list[tuple[int, str, float]]:
        with (run / "curves.csv").open(newline="") as file:
            return [(int(row["step"]), row["quantity"], float(row["value"])) for row in csv.DictReader(file)]

    return read


@pytest.fixture(scope="session")
def interrupt_at() -> Callable[[pytest.MonkeyPatch, int], None]:
    """Interrupt a run in a step, as Ctrl-C does."""
    inner = EncoderTrainer.training_step

    def interrupt(patch: pytest.MonkeyPatch, step: int) -> None:
        def training_step(self, *given):
            if self.state.global_step + 1 == step:
                raise KeyboardInterrupt
            return inner(self, *given)

        patch.setattr(EncoderTrainer, "training_step", training_step)

    return interrupt


@pytest.fixture
def hooks() -> Iterator[ExitStack]:
    """Hooks of torch that a test has set, and that go with it."""
    with ExitStack() as handles:
        yield handles


@pytest.fixture
def after_forward(hooks) -> Callable[[Callable], None]:
    """Call a function with each model, its inputs and its output; what it gives takes the output's place."""

    def add(call: Callable) -> None:
        def hook(module, _, inputs, output):
            return call(module, inputs, output) if isinstance(module, EncoderForSequenceClassification) else None

        hooks.enter_context(register_module_forward_hook(hook, with_kwargs=True))

    return add


@pytest.fixture
def around_step(hooks) -> Callable[..., None]:
    """Call functions with the parameters before and after each step of the optimizer."""

    def add(*, before: Callable | None = None, after: Callable | None = None) -> None:
        for call, register in ((before, register_optimizer_step_pre_hook), (after, register_optimizer_step_post_hook)):

            def hook(optimizer, *_, call=call):
                if type(optimizer) is AdamW:
                    call([weight for group in optimizer.param_groups for weight in group["params"]])

            if call is not None:
                hooks.callback(register(hook).remove)

    return add
