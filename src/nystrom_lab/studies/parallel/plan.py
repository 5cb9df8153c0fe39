"""`nystrom bench plan`: an estimate of a long-sequence training step on GPUs."""

from typing import Any

from nystrom.attention.registry import METHODS
from nystrom.checks import check_at_least, check_names
from nystrom_lab.report.step_costs import costs_markdown, costs_text

FORMULAS = """\
n tokens on R GPUs, L layers of width w = h d, feed-forward width f, m landmarks:
  compute           3 forward passes (4 with checkpointing) of n / R (8 w^2 + 4 w f) L and of attention,
                    such as 8 n / R m w L for nystrom and 4 n / R n w L for ring attention, / (flops utilisation)
  attention sends   sums over GPUs count 2 (R - 1) / R times; nystrom 4 h (2 m (d + 1) + m + m (d + 1)) L bytes a
                    pass, ring attention 4 (R - 1) n / R w L; all methods: nystrom.parallel.exchanged
  communication     (attention + 2 (R - 1) / R 4 (4 w^2 + 2 w f) L of weights' gradients) / bandwidth + latencies
  step              compute + communication; in ring attention, which sends while it computes, the longer of both
  memory            16 (4 w^2 + 2 w f) L + n / R (18 w + 4 f) L, with checkpointing n / R (2 w L + 18 w + 4 f)
Not counted: embeddings, heads, the optimizer."""
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


def run_plan(
    *,
    tokens: tuple[str, ...] = ("1M", "16M", "256M"),
    ranks: tuple[int, ...] = (8, 64, 512),
    attention: tuple[str, ...] = ("nystrom", "near_far", "linear"),
    landmarks: int | None = None,
    layers: int = 12,
    width: int = 768,
    heads: int = 12,
    feed_forward: int | None = None,
    taps: int = 0,
    checkpointing: bool = True,
    flops: float = 989e12,
    utilisation: float = 0.4,
    bandwidth: float = 50.0,
    latency: float = 20.0,
    memory: float = 80.0,
    markdown: bool = False,
) -> str:
    """Estimate a long-sequence training step on GPUs, against ring attention. Nothing is run.

    The defaults are an encoder of BERT-base's size on H100 SXM with 400 Gb/s of InfiniBand for each GPU, as NVIDIA
    publishes them (H100 and DGX H100 datasheets). The formulas are in nystrom_lab.studies.parallel.costs.

    Args:
        tokens: Tokens of the sequence, such as 65536, 64K or 16M (16 x 2^20).
        ranks: GPUs; each has an equal share of the tokens.
        attention: Methods that work across ranks.
        landmarks: Landmarks, clusters or features. Default: the method's own.
        layers: Layers.
        width: Width of the model.
        heads: Heads of each layer.
        feed_forward: Width of the feed-forward blocks; by default four times that of the model.
        taps: Width of the skip convolution of the values; 0 for none.
        checkpointing: Recompute layers in the backward pass instead of keeping their activations.
        flops: Multiplications and additions per second of a GPU; bfloat16 without sparsity.
        utilisation: Share of these operations that is achieved; an assumption.
        bandwidth: GB (10^9 bytes) per second that a GPU sends.
        latency: Latency of any collective in microseconds; an assumption.
        memory: Memory of a GPU in GB.
        markdown: Print the table as Markdown, without the formulas.

    Returns:
        A table, and the formulas.

    Raises:
        ValueError: An unknown or out-of-range argument.
    """
    asked = dict(locals())
    lengths = _check(asked)
    from nystrom_lab.studies.parallel.costs import EncoderShape, Machine, plan_step

    shape = EncoderShape(
        layers=layers,
        width=width,
        heads=heads,
        feed_forward=4 * width if feed_forward is None else feed_forward,
        taps=taps,
        checkpointing=checkpointing,
    )
    machine = Machine(
        flops=flops,
        utilisation=utilisation,
        bandwidth=1e9 * bandwidth,
        latency=1e-6 * latency,
        memory=1e9 * memory,
    )
    chosen = {name: _options(name, landmarks) for name in attention} | {"softmax": METHODS["softmax"].options()}
    costs = [
        plan_step(name, options, n, r, shape, machine)
        for n in lengths
        for r in ranks
        for name, options in chosen.items()
    ]

    return costs_markdown(costs) if markdown else f"{costs_text(costs)}\n\n{FORMULAS}"


def _check(asked: dict[str, Any]) -> list[int]:
    for name in ("tokens", "ranks", "attention"):
        if not asked[name]:
            raise ValueError(f"{name} is empty; expected at least one.")
    check_names("attention", asked["attention"], [name for name, method in METHODS.items() if method.over_ranks])
    for name in ("layers", "width", "heads"):
        check_at_least(name, asked[name], 1)
    for name, least in (("landmarks", 1), ("feed_forward", 1), ("taps", 0)):
        if asked[name] is not None:
            check_at_least(name, asked[name], least)
    if asked["width"] % asked["heads"]:
        raise ValueError(f"width is {asked['width']} and heads is {asked['heads']}; expected a multiple of the heads.")
    for name in ("flops", "utilisation", "bandwidth", "memory"):
        if not asked[name] > 0:
            raise ValueError(f"{name} is {asked[name]}; expected a positive number.")
    if asked["utilisation"] > 1:
        raise ValueError(f"utilisation is {asked['utilisation']}; expected a share, at most 1.")
    if not asked["latency"] >= 0:
        raise ValueError(f"latency is {asked['latency']}; expected microseconds, at least 0.")
    lengths = [count_tokens(word) for word in asked["tokens"]]
    for r in asked["ranks"]:
        check_at_least("an entry of ranks", r, 1)
        for n in lengths:
            if n % r:
                raise ValueError(f"{n} tokens cannot be split evenly across {r} ranks: pass a multiple of {r}.")
    return lengths


def count_tokens(word: str) -> int:
    """Parse a number such as 65536, 64K or 16M.

    Raises:
        ValueError: It is not a number.
    """
    number, unit = (word[:-1], _UNITS[word[-1].upper()]) if word and word[-1].upper() in _UNITS else (word, 1)
    if not (number.isascii() and number.isdigit() and int(number)):
        raise ValueError(f"an entry of tokens is {word!r}; expected a number such as 65536, 64K or 16M.")
    return int(number) * unit


def _options(method: str, landmarks: int | None) -> Any:
    kind = METHODS[method].options
    if landmarks is not None:
        for name in ("num_landmarks", "num_features", "num_clusters"):
            if name in kind.__dataclass_fields__:
                return kind(**{name: landmarks})
    return kind()
