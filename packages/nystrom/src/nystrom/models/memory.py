"""Detect encoders that do not fit in memory before they are created.

An encoder of $L$ layers of width $d$, with $f$ inside the feed-forward blocks and a vocabulary of $v$, has at least
$$W = 2 L d f + v d$$
weights. Its modules take about 50 kB a layer, whatever its width (measured by the resident memory of 200 and 1,000
layers without weights).
"""

import os

_MODULES = 50_000


def least_weights(*, layers: int, width: int, intermediate: int, vocabulary: int) -> int:
    """A lower bound on the number of weights of an encoder.

    Args:
        layers: Layers.
        width: Width of a token.
        intermediate: Width inside the feed-forward blocks.
        vocabulary: Tokens of the vocabulary.
    """
    return 2 * layers * width * intermediate + vocabulary * width


def check_memory(*, layers: int, width: int, intermediate: int, vocabulary: int, numbers: int) -> None:
    """Check that an encoder fits in the memory of this machine.

    Args:
        layers: Layers.
        width: Width of a token.
        intermediate: Width inside the feed-forward blocks.
        vocabulary: Tokens of the vocabulary.
        numbers: Numbers of 4 bytes that are kept for each weight: 1 for the model alone, 4 for a training by Adam.

    Raises:
        ValueError: It cannot.
    """
    weights = least_weights(layers=layers, width=width, intermediate=intermediate, vocabulary=vocabulary)
    wanted, there = 4 * numbers * weights + _MODULES * layers, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if wanted > there:
        raise ValueError(
            f"a model of {layers:,} layers, width {width:,}, {intermediate:,} inside and {vocabulary:,} tokens has at "
            f"least {weights:,} weights, and takes {wanted / 1e9:,.0f} GB, but this machine has {there / 1e9:,.0f} GB: "
            "take a smaller one."
        )
