r"""The estimated cost of an encoder's training step across ranks, compared with ring attention: time, bytes, memory.

One sequence of n tokens on R ranks, L layers of width w = h d, feed-forward blocks of width f, bfloat16 numbers.

- Compute of a rank, forward: $\tfrac nR (8 w^2 + 4 w f) L$ multiplications and additions in projections and
  feed-forward blocks, and those of attention (`FLOPS`). The backward pass takes twice as many, and recomputed layers
  add the forward pass once more. The time is their number divided by `flops` times `utilisation`.
- Communication of attention: the bytes that `nystrom.parallel.exchanged` gives for a call; a ring sends those that are
  summed $2 (R - 1) / R$ times. The time is the bytes divided by `bandwidth`, plus `latency` for each collective.
- Ring attention (Liu et al. 2023, arXiv:2310.01889): a rank sends keys and values $R - 1$ times,
  $2 (R - 1) \tfrac nR w$ numbers forward, and these and their gradients backward. It computes meanwhile, so the longer
  of the two times counts.
- Gradients of the weights, float32: $2 (R - 1) / R$ times $4 (4 w^2 + 2 w f) L$ bytes.
- Memory: 16 bytes for each weight (itself, its gradient and Adam's two moments, float32), and activations,
  $\tfrac nR (18 w + 4 f)$ bytes in each layer (Korthikanti et al. 2022, arXiv:2205.05198, which has 34 w at f = 4 w).
  Recomputed layers keep only their input, $2 \tfrac nR w$ bytes, and one layer at a time its activations.

Embeddings, heads and optimizer steps are left out.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nystrom.attention.parts.clusters import QUERY_MEANS
from nystrom.parallel.communication import Traffic
from nystrom.parallel.exchanged import CutSizes, exchanged
from nystrom_lab.report.step_costs import StepCost

_ITEM = 2


def _of_landmarks(options: Any, n: int, here: int, d: int) -> float:
    m = options.num_landmarks
    # Two products with the queries, two with the keys, and four of m x m in each step of the inverse.
    return 8 * here * m * d + 8 * getattr(options, "pinv_steps", 6) * m**3


def _of_near_far(options: Any, n: int, here: int, d: int) -> float:
    m, near = options.num_clusters, options.block_size + 2 * options.reach
    # Keys are compared with means of queries, to find the heavy keys, and with the centres of clusters.
    return 4 * here * (near + options.num_heavy + m) * d + 2 * here * (QUERY_MEANS + m) * d


# Multiplications and additions of one head in the forward pass, on a rank that holds `here` of n tokens. near_far's
# steps of k-means are not counted: they are on samples whose size does not grow with n.
FLOPS: dict[str, Callable[[Any, int, int, int], float]] = {
    "softmax": lambda options, n, here, d: 4 * here * n * d,
    "nystrom": _of_landmarks,
    "skyformer": _of_landmarks,
    "near_far": _of_near_far,
    "linear": lambda options, n, here, d: 4 * here * d * d,
    "performer": lambda options, n, here, d: 8 * here * options.num_features * d,
    "linformer": lambda options, n, here, d: 8 * here * options.num_features * d,
    "longformer": lambda options, n, here, d: 4 * here * (options.window + options.num_global) * d,
}


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The hardware that a step runs on.

    Attributes:
        flops: Multiplications and additions of a rank in a second.
        utilisation: Share of them that is achieved.
        bandwidth: Bytes that a rank sends in a second.
        latency: Minimum seconds of a collective.
        memory: Bytes of a rank.
    """

    flops: float
    utilisation: float
    bandwidth: float
    latency: float
    memory: float


@dataclass(frozen=True, kw_only=True)
class EncoderShape:
    """The layers of the encoder: how many, and their widths.

    Attributes:
        layers: Layers.
        width: Width w.
        heads: Heads h.
        feed_forward: Width f of the feed-forward blocks.
        taps: Width of the skip convolution; 0 for none.
        checkpointing: Whether layers are recomputed in the backward pass.
    """

    layers: int
    width: int
    heads: int
    feed_forward: int
    taps: int
    checkpointing: bool

    @property
    def weights(self) -> int:
        """Number of parameters."""
        return self.layers * (4 * self.width**2 + 2 * self.width * self.feed_forward)


def plan_step(method: str, options: Any, tokens: int, ranks: int, shape: EncoderShape, machine: Machine) -> StepCost:
    """The cost of a step with a method, or with ring attention.

    Args:
        method: A method that works across ranks; "softmax" is ring attention.
        options: Its options, a `METHODS[method].options`.
        tokens: Tokens n of the sequence.
        ranks: Ranks R.
        shape: The encoder.
        machine: The hardware.
    """
    here, d = tokens // ranks, shape.width // shape.heads
    dense = here * (8 * shape.width**2 + 4 * shape.width * shape.feed_forward)
    forward = shape.layers * (dense + shape.heads * FLOPS[method](options, tokens, here, d))
    compute = (4 if shape.checkpointing else 3) * forward / (machine.flops * machine.utilisation)
    passes = 2 if shape.checkpointing else 1
    if method == "softmax":
        piece = 2 * (ranks - 1) * here * shape.width * _ITEM
        sent, calls = shape.layers * piece * (passes + 2), shape.layers * (ranks - 1) * (passes + 1)
    else:
        sizes = CutSizes(batch=1, heads=shape.heads, head_dim=d, tokens=tokens, ranks=ranks, itemsize=_ITEM)
        call = exchanged(method, options, sizes, taps=shape.taps)
        sent = shape.layers * (passes * on_the_wire(call.forward, ranks) + on_the_wire(call.backward, ranks))
        calls = shape.layers * (passes * call.forward.calls + call.backward.calls)
    attention = sent / machine.bandwidth + calls * machine.latency
    weights = 2 * (ranks - 1) / ranks * 4 * shape.weights / machine.bandwidth + machine.latency
    step = (max(compute, attention) if method == "softmax" else compute + attention) + weights
    memory = 16 * shape.weights + activations(here, shape)
    name = "ring attention" if method == "softmax" else method
    return StepCost(
        tokens, ranks, name, compute, sent, attention + weights, step, memory, fits=memory <= machine.memory
    )


def on_the_wire(traffic: Traffic, ranks: int) -> float:
    """Bytes that a rank sends, with sums computed by a ring."""
    ring = 2 * (ranks - 1) / ranks
    return sum(ring * size if kind in ("sum", "maximum") else size for kind, size in traffic.by_kind.items())


def activations(here: int, shape: EncoderShape) -> int:
    """Bytes that the layers keep for the backward pass of `here` tokens."""
    layer = here * (18 * shape.width + 4 * shape.feed_forward)
    return shape.layers * 2 * here * shape.width + layer if shape.checkpointing else shape.layers * layer
