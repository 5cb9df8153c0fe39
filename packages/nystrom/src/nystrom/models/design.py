r"""Head, dropout and initial values as in three code bases: `design` of `EncoderConfig`.

| | "transformers" | "authors" | "official" |
|---|---|---|---|
| classification head | width, the activation, two dropouts | feed-forward width, ReLU, no dropout | the same |
| dropout inside the feed-forward block | no | yes | yes |
| dropout of the weights of exact and kernelized attention | no | `attention_probs_dropout_prob` | no |
| linear layers start | normal, `initializer_range` | torch's | Xavier's uniform, biases at 0 |
| words start | normal, `initializer_range` | normal, 0.02 | normal, 1 |
| table of positions starts | normal, `initializer_range` | normal, 0.02 | normal, 0.02 |
| segments start | normal, `initializer_range` | at 0 | at 0 |

Neither of the last two code bases has segments; starting them at 0 means no effect at first. Attention weights are
dropped by `nystrom.models.parts.dropped_weights`, which stores them; a dropout of 0 keeps exact attention fused.

Source: the code of Xiong et al. (2021), arXiv:2102.03902, and of Chen et al. (2021), arXiv:2111.00035, for the Long
Range Arena, LRA/code/model.py and code/models; of Tay et al. (2021), arXiv:2011.04006,
lra_benchmarks/models/transformer/transformer.py and models/layers/common_layers.py.
Departs from them: pooling uses only real tokens, where the papers' code takes the mean over all positions, padding as
zeros; no dropout of the weights of other attentions, which Skyformer's code has for some; from the official code, no
dropout of weights at all, and attention has biases.
"""

from torch import nn

from nystrom.checks import Design
from nystrom.models.configuration import EncoderConfig


class EmbeddingTable(nn.Embedding):
    """An embedding with its own initial standard deviation; 0 for zeros."""

    def __init__(self, rows: int, width: int, *, std: float, padding_idx: int | None = None):
        super().__init__(rows, width, padding_idx=padding_idx)
        self.std = std

    def start(self) -> None:
        """Draw the weights."""
        nn.init.normal_(self.weight, std=self.std)
        if self.padding_idx is not None:
            nn.init.zeros_(self.weight[self.padding_idx])


def start_stds(config: EncoderConfig) -> tuple[float, float, float]:
    """The initial standard deviations of words, positions and segments."""
    if config.design == "transformers":
        return config.initializer_range, config.initializer_range, config.initializer_range
    return 0.02 if config.design == "authors" else 1.0, 0.02, 0.0


def start_linear(module: nn.Linear, design: Design) -> None:
    """Give a linear layer the initial values of a design other than "transformers"."""
    if design == "authors":
        module.reset_parameters()
        return
    nn.init.xavier_uniform_(module.weight)
    if module.bias is not None:
        nn.init.zeros_(module.bias)
