"""The shapes of the five tasks of the Long Range Arena, and of the papers' model for them, without torch.

Source: Xiong et al. (2021), arXiv:2102.03902, and Chen et al. (2021), arXiv:2111.00035, section 5; the batches are
those of the latter.
"""

from dataclasses import dataclass


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
    "listops": TaskShape(n=2000, vocab_size=17, num_labels=10, batch=32, padded=True),
    "text": TaskShape(n=4000, vocab_size=257, num_labels=2, batch=16, padded=True),
    "retrieval": TaskShape(n=4000, vocab_size=257, num_labels=2, batch=16, padded=True, documents=2),
    "image": TaskShape(n=1024, vocab_size=256, num_labels=10, batch=256, padded=False),
    "pathfinder": TaskShape(n=1024, vocab_size=256, num_labels=2, batch=128, padded=False),
}

LAYERS, WIDTH, HEADS, HIDDEN = 2, 64, 2, 128

# The methods of Table 2 of Skyformer, with their numbers, and fused exact attention.
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
)
