"""The shapes of the five tasks of the Long Range Arena and of the papers' model for them; needs no torch.

Source: Xiong et al. (2021), arXiv:2102.03902, and Chen et al. (2021), arXiv:2111.00035, section 5; the batches are
those of the latter.
"""

from dataclasses import dataclass

from nystrom_lab.data.lra.facts import LRA
from nystrom_lab.training.presets.published import find_preset


@dataclass(frozen=True)
class TaskShape:
    """The shape of a task.

    Attributes:
        n: Tokens of a sequence.
        vocab_size: Tokens of the vocabulary.
        num_labels: Classes.
        batch: Samples of a step, in Skyformer's experiments.
        padded: Whether sequences are padded to n.
        documents: Sequences of a sample.
    """

    n: int
    vocab_size: int
    num_labels: int
    batch: int
    padded: bool
    documents: int = 1


SHAPES: dict[str, TaskShape] = {
    task: TaskShape(
        n=facts.max_length,
        vocab_size=facts.vocab_size,
        num_labels=facts.num_labels,
        batch=find_preset(task, "skyformer").batch_size,
        padded=facts.pad_token_id is not None,
        documents=facts.documents,
    )
    for task, facts in LRA.items()
}

LAYERS, WIDTH, HEADS, HIDDEN = 2, 64, 2, 128

# The methods of Table 2 of Skyformer, with their numbers, fused exact attention, and near_far.
TABLE_2_METHODS = (
    "softmax-materialised",
    "softmax",
    "kernelized",
    "nystrom-128",
    "linformer-128",
    "informer-128",
    "performer-128",
    "reformer-2",
    "bigbird-3",
    "skyformer-128",
    "near_far",
)
