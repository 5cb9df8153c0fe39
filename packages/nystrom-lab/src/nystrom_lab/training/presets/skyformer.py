"""The settings of the Skyformer paper for the Long Range Arena; it reports means over three seeds.

Text has the batch of the paper, 16; its code has 32. Text comes in two lengths: "skyformer" has the 4,000 bytes of the
paper's table, "skyformer-1000" the 1,000 bytes of the data that the Nyströmformer's released code prepares.

Source: Chen et al. (2021), arXiv:2111.00035, and its code's code/config.py and code/main.py.
Departs from that code: the validation split is evaluated as a whole, on Text and Retrieval every 2,500 and on Image
every 250 steps, instead of in part every 500, 1,000 and 50. `nystrom_lab.training.presets.published` describes what
both papers' presets have in common.
"""

from collections.abc import Mapping

from nystrom_lab.training.presets.nystromformer import linformer, reformer
from nystrom_lab.training.presets.preset import MethodSetting, Preset
from nystrom_lab.training.presets.sizes import published_sizes


def _methods(length: int) -> Mapping[str, MethodSetting]:
    return {
        "nystrom": MethodSetting({"num_landmarks": 128, "pinv_steps": 6}),
        "skyformer": MethodSetting({"num_landmarks": 128, "gamma": 0.1, "pinv_steps": 6}),
        "linformer": linformer(128, length, frozen=True),
        "performer": MethodSetting({"num_features": 128}),
        "reformer": reformer(length),
        "bigbird": MethodSetting({"block_size": 64, "num_random_blocks": 3}),
        "informer": MethodSetting({"num_queries": 128, "num_samples": 128}),
    }


def _preset(
    task: str,
    *,
    warmup_steps: int,
    batch_size: int = 16,
    learning_rate: float = 1e-4,
    evaluate_every: int = 500,
    log_every: int = 100,
    max_length: int | None = None,
) -> Preset:
    return Preset(
        task=task,
        name="skyformer" if max_length is None else f"skyformer-{max_length}",
        source="Chen et al. 2021, arXiv:2111.00035",
        data=published_sizes(task, max_length=max_length),
        methods=_methods,
        batch_size=batch_size,
        learning_rate=learning_rate,
        warmup_steps=warmup_steps,
        steps=50_000,
        evaluate_every=evaluate_every,
        log_every=log_every,
        design="authors",
        best_after=0.2,
        clip_value=1.0,
    )


SKYFORMER: tuple[Preset, ...] = (
    _preset("listops", warmup_steps=1_000, batch_size=32),
    _preset("text", warmup_steps=80, evaluate_every=2_500),
    _preset("text", warmup_steps=80, evaluate_every=2_500, max_length=1_000),
    _preset("retrieval", warmup_steps=800, learning_rate=2e-4, evaluate_every=2_500),
    _preset("image", warmup_steps=175, batch_size=256, evaluate_every=250, log_every=50),
    _preset("pathfinder", warmup_steps=312, batch_size=128, learning_rate=2e-4),
)
