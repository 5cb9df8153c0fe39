"""Every private name of torch that this library uses, with what it is for; `test_private_names.py` holds it to that.

A new version of torch may move or drop any of them: this is the file to read then.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import TypeVar

import torch
from torch._C import _are_functorch_transforms_active as is_transformed  # Inside vmap, grad or another of torch.func
from torch._C import _current_graph_task_id as graph_task  # Id of the backward pass that runs; negative outside of one
from torch._C import _get_tracing_state as tracing_state  # None outside of torch.jit.trace
from torch._C import _len_torch_dispatch_stack as count_modes  # Modes that see each operator
from torch._C._autograd import _get_current_graph_task_keep_graph as keeps_graph  # retain_graph of the pass that runs
from torch._C._autograd import _top_saved_tensors_default_hooks as saved_tensors_hooks
from torch._C._functorch import is_legacy_batchedtensor as is_batched_gradient  # Made by is_grads_batched
from torch._C._functorch import unwrap_if_dead as without_ended_transform  # The tensor of a transform that has ended
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack as outside_transforms
from torch._subclasses.fake_tensor import FakeTensor  # A tensor without numbers
from torch.autograd import forward_ad

F = TypeVar("F", bound=Callable[..., object])

__all__ = [
    "FakeTensor",
    "assert_in_graph",
    "assume",
    "cdist_backward",
    "constant_of_graphs",
    "count_modes",
    "graph_task",
    "is_batched_gradient",
    "is_forward_mode",
    "is_transformed",
    "keeps_graph",
    "outside_transforms",
    "saved_tensors_hooks",
    "skip_code",
    "softmax_backward",
    "tracing_state",
    "with_autograd",
    "without_ended_transform",
]

# Raises where a condition on values does not hold when a compiled graph runs.
assert_in_graph = torch._assert_async  # pyright: ignore[reportPrivateImportUsage]
# Tells a compiler that a condition on sizes holds.
assume = torch._check
# The gradients of the first points of torch.cdist, and of a softmax.
cdist_backward = torch.ops.aten._cdist_backward
softmax_backward = torch.ops.aten._softmax_backward_data


def is_forward_mode() -> bool:
    """Whether any tensor is being differentiated in forward mode."""
    # Tensors do not show it: inside a gradient of torch.func their tangents are hidden.
    return forward_ad._current_level >= 0


@contextmanager
def with_autograd() -> Iterator[None]:
    """Record a graph inside an operator of our own, below which torch records none."""
    keys = torch._C.DispatchKey
    with (
        torch._C._SetExcludeDispatchKeyGuard(keys.AutogradFunctionality, False),
        torch._C._SetExcludeDispatchKeyGuard(keys.ADInplaceOrView, False),
        torch.enable_grad(),
    ):
        yield


def skip_code(code: CodeType) -> None:
    """Let a compiler make no graph of a function of its own."""
    # Importing the compiler takes seconds.
    from torch._dynamo.eval_frame import skip_code

    skip_code(code)


def constant_of_graphs(function: F) -> F:
    """Let a compiler call a function once and keep its result, as torch.compiler.assume_constant_result does.

    The function itself would import the compiler.
    """
    function._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
    return function
