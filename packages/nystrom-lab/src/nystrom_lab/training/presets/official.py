"""The settings of the official code of the Long Range Arena, for its Transformer.

The published rates are multiplied by the inverse root of the step: 0.05 at step s is 0.05 / sqrt(max(s, warm-up)), that
is 0.05 / sqrt(warm-up) at the end of the warm-up. Retrieval's warm-up of 8,000 steps is longer than its 5,000 steps; a
warm-up of 4,999 steps to the rate of that step is the same.

Source: Tay et al. (2021), arXiv:2011.04006, and its code's lra_benchmarks/*/configs.
Departs from that code: positions are learned on all tasks, where its texts, ListOps and Pathfinder have sines; each
layer has its own weights, where its ListOps has shared ones; biases and norms do not decay; no dropout of attention
weights; the validation split is evaluated as a whole, more rarely. `nystrom.models.design` describes the model. The
code came in versions: others have 6 layers, 2,048 inside, for ListOps, and width 32 with one head for Image.
"""

from collections.abc import Mapping
from typing import Any

from nystrom_lab.training.presets.nystromformer import linformer, reformer
from nystrom_lab.training.presets.preset import MethodSetting, Preset
from nystrom_lab.training.presets.sizes import published_sizes


def _methods(length: int) -> Mapping[str, MethodSetting]:
    return {"linformer": linformer(128, length), "reformer": reformer(length)}


def _rsqrt(warmup: int, steps: int) -> dict[str, Any]:
    """The rate 0.05, with a warm-up that ends before training does."""
    end = min(warmup, steps - 1)
    rate = 0.05 * warmup**-0.5 * end / warmup
    return {"learning_rate": rate, "warmup_steps": end, "steps": steps, "schedule": "rsqrt", "weight_decay": 0.1}


def _cosine(rate: float, batches: int) -> dict[str, Any]:
    """200 passes of `batches` batches, the first of which is the warm-up."""
    return {"learning_rate": rate, "warmup_steps": batches, "steps": 200 * batches, "schedule": "cosine"}


def _preset(
    task: str,
    *,
    width: int,
    heads: int,
    layers: int,
    inner: int,
    training: Mapping[str, Any],
    batch_size: int = 32,
    evaluate_every: int,
    max_length: int | None = None,
    **others: Any,
) -> Preset:
    chosen: dict[str, Any] = {"pooling": "cls"} | dict(training) | others
    return Preset(
        task=task,
        name="official",
        source="Tay et al. 2021, arXiv:2011.04006",
        data=published_sizes(task, max_length=max_length),
        methods=_methods,
        batch_size=batch_size,
        evaluate_every=evaluate_every,
        log_every=evaluate_every // 10,
        hidden_size=width,
        num_attention_heads=heads,
        num_hidden_layers=layers,
        intermediate_size=inner,
        design="official",
        adam_betas=(0.9, 0.98),
        adam_epsilon=1e-9,
        **chosen,
    )


OFFICIAL: tuple[Preset, ...] = (
    _preset("listops", width=512, heads=8, layers=4, inner=1_024, training=_rsqrt(1_000, 5_000), evaluate_every=500),
    _preset(
        "text", width=256, heads=4, layers=4, inner=1_024, training=_rsqrt(8_000, 20_000), evaluate_every=1_000,
        max_length=1_000,
    ),
    _preset("retrieval", width=128, heads=4, layers=4, inner=512, training=_rsqrt(8_000, 5_000), evaluate_every=500),
    _preset(
        "image", width=128, heads=8, layers=1, inner=128, training=_cosine(5e-4, 175), evaluate_every=350,
        batch_size=256, attention_size=64,
    ),
    _preset(
        "pathfinder", width=128, heads=4, layers=1, inner=128, training=_cosine(1e-3, 312), evaluate_every=3_120,
        batch_size=512, attention_size=64, pooling="mean", hidden_dropout_prob=0.2,
    ),
)  # fmt: skip
