"""The model and the inputs of a training step on each task of the Long Range Arena, at the papers' shapes.

Two layers of width 64 with two heads, hidden width 128, mean pooling, dropout 0.1, norms before the blocks. Texts are
padded to the task's length; their real lengths are drawn uniformly from a quarter of it to all of it. Pictures have no
padding. Tokens and classes are drawn at random: they do not change the cost of a step.

Source: Xiong et al. (2021), arXiv:2102.03902, and Chen et al. (2021), arXiv:2111.00035, section 5; the batches are
those of the latter.
"""

import torch
from torch import Tensor

from nystrom.models import EncoderConfig, EncoderForSequenceClassification
from nystrom.models.heads.pairs import EncoderForPairClassification
from nystrom_lab.studies.speed.contenders.table import Ours, find_contender
from nystrom_lab.studies.speed.lra_shapes import HEADS, HIDDEN, LAYERS, WIDTH, TaskShape

Batch = dict[str, Tensor]


def find_method(name: str) -> tuple[Ours, int]:
    """The method of this library that a name such as "nystrom-128" means, and its number.

    Raises:
        ValueError: The name is unknown, belongs to another package, or means an attention that is compiled: models use
            this library's methods only, as they are.
    """
    contender, number = find_contender(name)
    if not isinstance(contender.build, Ours) or contender.build.compiled:
        raise ValueError(
            f"method {name!r} is not a method of this library, as `nystrom methods` lists them: whole models are "
            "measured with these only."
        )
    return contender.build, number


def build_model(
    name: str, task: TaskShape, seed: int
) -> EncoderForSequenceClassification | EncoderForPairClassification:
    """The model of a task with the attention of a name such as "nystrom-128", with random weights.

    Raises:
        ValueError: As `find_method`.
    """
    method, number = find_method(name)
    config = EncoderConfig(
        vocab_size=task.vocab_size,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=HIDDEN,
        max_position_embeddings=task.n,
        attention=method.method,
        attention_options=method.options(number, task.n),
        norm="pre",
        pooling="mean",
        num_labels=task.num_labels,  # pyright: ignore[reportCallIssue] (transformers takes it in addition to the fields)
    )
    torch.manual_seed(seed)
    return (EncoderForPairClassification if task.documents == 2 else EncoderForSequenceClassification)(config)


def random_batch(task: TaskShape, batch: int, seed: int, device: torch.device) -> Batch:
    """A batch, determined by the seed."""
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, task.n) if task.documents == 1 else (batch, task.documents, task.n)
    inputs = {
        "input_ids": torch.randint(1, task.vocab_size, shape, generator=generator),
        "labels": torch.randint(task.num_labels, (batch,), generator=generator),
    }
    if task.padded:
        lengths = torch.randint(task.n // 4, task.n + 1, (*shape[:-1], 1), generator=generator)
        inputs["attention_mask"] = torch.arange(task.n) < lengths
    return {name: x.to(device) for name, x in inputs.items()}
