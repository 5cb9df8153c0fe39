"""Whether a forward pass is that of a training step, or one that a checkpoint makes again."""

import torch


def is_computed_again() -> bool:
    """Whether this is the second forward pass of a checkpoint, which runs inside a backward pass."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() >= 0
