r"""Results of training and scoring as rows of `nystrom.measure.rows`.

An accuracy is a share between 0 and 1, and its spread the 95 % interval of Wilson (1927),
$$\frac{p + z^2 / 2N \pm z \sqrt{p (1 - p) / N + z^2 / 4 N^2}}{1 + z^2 / N},\quad z = 1.96,$$
which says how far another draw of N samples could have moved it, and nothing of another seed of training.
"""

import math
from typing import NamedTuple

import torch

from nystrom.measure.rows import Row, cpu_name, new_row
from nystrom.models import EncoderConfig


class Place(NamedTuple):
    """Where a result was measured.

    Attributes:
        device: "cpu" or "cuda".
        precision: What was computed in.
        seed: Of the training; None where the model came from elsewhere.
        preset: Of the training; "" where the model came from elsewhere.
    """

    device: str
    precision: str
    seed: int | None
    preset: str = ""


def accuracy_row(config: EncoderConfig, quantity: str, share: float, samples: int, place: Place) -> Row:
    """An accuracy with its interval, `repeats` being the samples that it was counted on."""
    return result_row(config, quantity, share, "", place, spread=wilson(share, samples), repeats=samples)


def result_row(
    config: EncoderConfig,
    quantity: str,
    value: float,
    unit: str,
    place: Place,
    *,
    spread: tuple[float, float] | tuple[None, None] = (None, None),
    repeats: int = 1,
    study: str | None = None,
    sizes: str = "",
) -> Row:
    """A number that belongs to a trained model.

    Args:
        config: Of the model.
        quantity: What the number is of.
        value: The number.
        unit: Its unit.
        place: Where it was measured.
        spread: Its spread; the quantity says which.
        repeats: Measurements behind it.
        study: Name of the study; training on the model's task if not given.
        sizes: Sizes beside those of the model.
    """
    landmarks = config.attention_options.get("num_landmarks")
    size = "" if landmarks is None else f"-{landmarks}"
    skip = "" if config.conv_kernel_size is None else "+skip"
    return new_row(
        study=f"train {config.task}" if study is None else study,
        quantity=quantity,
        method=f"{config.attention}{size}{skip}",
        value=value,
        unit=unit,
        low=spread[0],
        high=spread[1],
        repeats=repeats,
        n=config.max_position_embeddings,
        m=landmarks,
        sizes=f"layers={config.num_hidden_layers} width={config.hidden_size} heads={config.num_attention_heads}"
        f"{f' preset={place.preset}' if place.preset else ''}{f' {sizes}' if sizes else ''}",
        dtype=place.precision,
        seed=place.seed,
        device=torch.cuda.get_device_name() if place.device == "cuda" else cpu_name(),
    )


def wilson(share: float, samples: int) -> tuple[float, float]:
    """The 95 % interval of a share that was counted on so many samples."""
    z = 1.96
    middle = share + z * z / (2 * samples)
    half = z * math.sqrt(share * (1 - share) / samples + z * z / (4 * samples * samples))
    return (middle - half) / (1 + z * z / samples), (middle + half) / (1 + z * z / samples)
