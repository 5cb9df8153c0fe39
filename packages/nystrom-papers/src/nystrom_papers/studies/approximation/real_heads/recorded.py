"""All heads of an encoder on real prose, a layer at a time, and the six of them that figures show.

Rows are over all heads and texts, a head counting once for each text, with the pretrained weights and with weights that
are initialised at random. The six heads are chosen before anything is measured, spread evenly over the model: with all
its heads numbered from the first layer on, they are those in the middle of each sixth. Their pictures are of the first
text.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from jaxtyping import Float
from torch import Tensor

from nystrom.attention.fused import softmax_rows
from nystrom.integrations.model_loader import read_model_config
from nystrom_lab.measure.rows import Row
from nystrom_papers.studies.reproduce.encoders import Encoder, Weights, find_encoder, instead_of_bert_base
from nystrom_papers.studies.reproduce.study import Part, Plan, Setting, Size

LENGTH, SHOWN = 512, 6
WEIGHTS: tuple[Weights, ...] = ("pretrained", "initialised")


@dataclass(frozen=True)
class LayerHeads:
    """The heads of one layer, in float64.

    `shown` are the heads that figures show; none with initialised weights.
    """

    weights: Weights
    layer: int
    shown: tuple[int, ...]
    q: Float[Tensor, "b h n d"]
    k: Float[Tensor, "b h n d"]
    v: Float[Tensor, "b h n e"]

    @property
    def facts(self) -> dict[str, object]:
        """The facts that every row of the layer has."""
        b, h, _, d = self.q.shape
        return {"weights": self.weights, "layer": self.layer, "b": b, "h": h, "d": d}

    def softmax(self) -> Float[Tensor, "b h n n"]:
        """The exact attention matrices."""
        return softmax_rows(self.q, self.k)


@dataclass(frozen=True)
class RealHeads:
    """All heads of an encoder over some texts.

    Figures show the heads `shown`, by layer and head.
    """

    encoder: Encoder
    size: Size
    texts: int
    shown: tuple[tuple[int, int], ...]

    def layers(self, weights: Weights, numbers: Iterable[int] | None = None) -> list[LayerHeads]:
        """Record some layers, or all of them."""
        wanted = tuple(range(self.encoder.layers)) if numbers is None else tuple(numbers)
        recorded = self.encoder.record(LENGTH, self.texts, wanted, weights=weights)
        result = []
        for layer, each in recorded.items():
            shown = tuple(head for where, head in self.shown if where == layer) if weights == "pretrained" else ()
            q, k, v = (x.double() for x in each)
            result.append(LayerHeads(weights, layer, shown, q, k, v))
        return result

    def by_layer(self, measure: Callable[[LayerHeads, Path], Iterable[Row]]) -> list[Part]:
        """A part for each layer and kind of weights."""

        def measured(weights: Weights, layer: int, folder: Path) -> Iterable[Row]:
            (heads,) = self.layers(weights, (layer,))
            return measure(heads, folder)

        return [
            Part(f"{weights}-layer={layer}", partial(measured, weights, layer))
            for weights in WEIGHTS
            for layer in range(self.encoder.layers)
        ]

    def plan(self, parts: Sequence[Part], landmarks: Sequence[int], **said: object) -> Plan:
        """The plan of a study; `said` adds to its setting, beside the model and the texts."""
        setting = self.encoder.in_words(length=LENGTH, landmarks=landmarks, sequences=self.texts, **said)
        read = "1 text" if self.texts == 1 else f"{self.texts} texts"
        if self.size == "small":
            return Plan(parts, setting, f"{self.encoder.name} instead of BERT-base, {read}")
        lacks = filter(None, [instead_of_bert_base(self.encoder.folder), f"windows of {self.encoder.prose.name}"])
        return Plan(parts, setting, f"{', '.join(lacks)} instead of texts that the paper does not name")


def find_heads(setting: Setting, *, small_texts: int = 2) -> RealHeads:
    """The heads of a setting, checked. At the paper's size there are ten texts: the paper says only that they are real.

    Raises:
        ValueError: No encoder is available, the texts are too short, or the paper's size is requested without a model.
    """
    if setting.size == "paper" and setting.model is None:
        raise ValueError("--size paper needs a trained BERT-base: name its folder with --model.")
    encoder = find_encoder(setting)
    texts = 10 if setting.size == "paper" else small_texts
    encoder.check_length(LENGTH, texts)
    heads = int(read_model_config(encoder.folder).num_attention_heads)
    return RealHeads(encoder, setting.size, texts, tuple(shown_heads(encoder.layers, heads)))


def shown_heads(layers: int, heads: int) -> list[tuple[int, int]]:
    """Layer and head of up to six heads that are spread evenly over a model."""
    every = layers * heads
    count = min(SHOWN, every)
    return [divmod(every * (2 * i + 1) // (2 * count), heads) for i in range(count)]
