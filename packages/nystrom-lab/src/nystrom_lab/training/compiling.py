"""Compile a model for training: one graph for all steps.

Every batch is padded to the positions of the model (`nystrom_lab.training.batches`), so that all steps have one
shape. The whole model becomes one graph per shape: one for the steps, one for evaluation, and one for its last batch if
that is smaller. Padding changes nothing, so without dropout the results are those of the plain model, up to rounding;
dropout masks differ, and with inductor also the draws of random methods in training.

The model is compiled in place (`torch.nn.Module.compile`): its weights, folder and checkpoints are the same as without
compilation. The Trainer's own `torch_compile` would compute float32 in TF32, and would not compile evaluation.
"""

import torch
from torch import nn

from nystrom.models import EncoderModel
from nystrom_lab.training.tasks import Model

BACKEND = "inductor"


def compile_model(model: Model | EncoderModel) -> None:
    """Compile a model in place; each graph is compiled when first needed."""
    # The model's loss would set this in the first step, and the second would then need another graph.
    model.config.problem_type = "single_label_classification"
    compile_module(model)


def compile_module(module: nn.Module) -> None:
    """Compile, in place, a module whose inputs always have one shape; see `compile_model`."""
    module.compile(fullgraph=True, dynamic=False, backend=BACKEND)


def check_compiler(device: str) -> None:
    """Check that torch can compile here, before data and model are created.

    Raises:
        ValueError: It cannot; the message says what is missing.
    """
    x = torch.ones(2, device=device, requires_grad=True)
    try:
        torch.compile(_probe, fullgraph=True, dynamic=False, backend=BACKEND)(x).backward()
    except RuntimeError as error:
        # The first line names the compiler, the second is its message.
        why = " ".join(str(error).split("\n")[:2]).strip() or type(error).__name__
        raise ValueError(
            f"compile is on, but torch cannot compile for {device!r} here ({why}): leave it out."
        ) from error


def _probe(x: torch.Tensor) -> torch.Tensor:
    return x.exp().sum()
