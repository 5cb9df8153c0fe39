"""Small data sets of the tasks, and hooks around the steps of a training."""

from collections.abc import Callable

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


@pytest.fixture
def around_step(hooks) -> Callable[..., None]:
    """Call functions with the weights before and after each step of AdamW."""

    def add(*, before: Callable | None = None, after: Callable | None = None) -> None:
        for call, register in ((before, register_optimizer_step_pre_hook), (after, register_optimizer_step_post_hook)):

            def hook(optimizer, *_, call=call):
                if type(optimizer) is torch.optim.AdamW:
                    call([weight for group in optimizer.param_groups for weight in group["params"]])

            if call is not None:
                hooks.callback(register(hook).remove)

    return add
