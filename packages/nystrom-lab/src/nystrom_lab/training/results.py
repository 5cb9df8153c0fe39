r"""Results of training and evaluation as rows of `nystrom_lab.measure.rows`.

An accuracy is a share between 0 and 1, and its spread the 95 % interval of Wilson (1927),
$$\frac{p + z^2 / 2N \pm z \sqrt{p (1 - p) / N + z^2 / 4 N^2}}{1 + z^2 / N},\quad z = 1.96,$$
which covers other draws of N samples, but not other seeds of training.

A row of a training records the command that reproduces that run by itself, however it was started.
"""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from nystrom.attention.method_names import SIZES, sized_name
from nystrom.models import EncoderConfig
from nystrom_lab.measure.rows import Row, started_as
from nystrom_lab.training.hardware import device_name
from nystrom_lab.training.run_settings import Settings

# Changes of a preset that rows record elsewhere, or that affect when results are looked at but not what is trained.
_SAID_ELSEWHERE = ("steps", "evaluate_every", "log_every")


class Provenance(NamedTuple):
    """The provenance of a result.

    Attributes:
        device: "cpu" or "cuda".
        precision: The precision of the computation.
        seed: Seed of the training; None for a model from elsewhere.
        facts: The preset of the training and its changes, see `setting_facts`; the fingerprint of a model from
            elsewhere.
        command: The command that produced it; None for the command that started this process.
    """

    device: str
    precision: str
    seed: int | None
    facts: Mapping[str, object] = MappingProxyType({})
    command: str | None = None


def setting_facts(settings: Settings) -> dict[str, object]:
    """A preset and its changes, except for the size in the method's name: they distinguish runs."""
    _, size = sized_name(settings.attention, settings.options)
    named = set() if size is None else {f"options.{name}" for name in SIZES[settings.attention][0]}
    changed = {name: value for name, value in settings.changes().items() if name not in {*named, *_SAID_ELSEWHERE}}
    changed |= {"mask_share": settings.mask_share} if settings.mask_share else {}
    changed |= {"model": settings.fingerprint} if settings.fingerprint else {}
    if settings.pooled_norm != "none" and settings.part_size != settings.batch_size:
        # The norm's mean and variance are those of the samples that a process takes at a time.
        changed["part_size"] = settings.part_size
    return {"preset": settings.preset, **changed}


def accuracy_row(
    config: EncoderConfig, quantity: str, share: float, samples: int, provenance: Provenance, **more: Any
) -> Row:
    """An accuracy with its interval, `repeats` being the number of samples."""
    return result_row(config, quantity, share, "", provenance, spread=wilson(share, samples), repeats=samples, **more)


def result_row(
    config: EncoderConfig,
    quantity: str,
    value: float,
    unit: str,
    provenance: Provenance,
    *,
    spread: tuple[float, float] | tuple[None, None] = (None, None),
    repeats: int = 1,
    study: str | None = None,
    facts: Mapping[str, object] | None = None,
    note: str = "",
) -> Row:
    """A number that belongs to a trained model.

    Args:
        study: Name of the study. Default: training on the model's task.
        facts: In addition to the sizes of the model.
    """
    method, size = sized_name(config.attention, config.attention_options)
    model: dict[str, object] = {
        "layers": config.num_hidden_layers,
        "width": config.hidden_size,
        "heads": config.num_attention_heads,
    }
    if config.attention == "linformer":
        model |= {"projections": "frozen" if config.attention_options.get("frozen", False) else "trained"}
    return Row(
        study=f"train {config.task}" if study is None else study,
        quantity=quantity,
        method=method if config.conv_kernel_size is None else f"{method}+skip",
        value=value,
        unit=unit,
        low=spread[0],
        high=spread[1],
        repeats=repeats,
        n=config.max_position_embeddings,
        m=size,
        facts={**model, **provenance.facts, **(facts or {})},
        dtype=provenance.precision,
        seed=provenance.seed,
        device=device_name(provenance.device),
        command=provenance.command or started_as(),
        note=note,
    )


def wilson(share: float, samples: int) -> tuple[float, float]:
    """The 95 % interval of a share of `samples` samples."""
    z = 1.96
    middle = share + z * z / (2 * samples)
    half = z * math.sqrt(share * (1 - share) / samples + z * z / (4 * samples * samples))
    return (middle - half) / (1 + z * z / samples), (middle + half) / (1 + z * z / samples)
