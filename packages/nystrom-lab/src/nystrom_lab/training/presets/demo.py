"""A first look at each task: few steps on short sequences, for a few minutes on two cores.

With initial weights and learning rates larger than the papers', training leaves its initial plateau sooner; on Text the
plateau still lasts longer than 1,000 steps. Images cannot be made shorter, so Image and Pathfinder use smaller batches
and fewer steps. The validation splits of Text and Retrieval are large, so they are evaluated rarely.
"""

from collections.abc import Mapping
from dataclasses import replace

from nystrom_lab.training.presets.preset import MethodSetting, Preset
from nystrom_lab.training.presets.sizes import DataSizes, published_sizes


def _methods(length: int) -> Mapping[str, MethodSetting]:
    return {
        "nystrom": MethodSetting({"num_landmarks": 32}, conv_kernel_size=35),
        "skyformer": MethodSetting({"num_landmarks": 32}),
    }


def _short(task: str) -> DataSizes:
    """The published texts of a task, cut at 512 bytes."""
    return replace(published_sizes(task, max_length=512), folder=f"{task}-demo")


def _preset(
    task: str,
    data: DataSizes,
    *,
    steps: int = 1_000,
    evaluate_every: int = 1_000,
    batch_size: int = 32,
    learning_rate: float = 1e-3,
) -> Preset:
    return Preset(
        task=task,
        name="demo",
        source="nystrom",
        data=data,
        methods=_methods,
        batch_size=batch_size,
        learning_rate=learning_rate,
        warmup_steps=100,
        steps=steps,
        evaluate_every=evaluate_every,
        log_every=20,
        initializer_range=0.1,
    )


_DRAWN = {"train": 16_000, "val": 1_000, "test": 2_000}

DEMO: tuple[Preset, ...] = (
    _preset(
        "listops",
        DataSizes(folder="listops-demo", **_DRAWN, min_length=16, max_length=512),
        steps=700,
        evaluate_every=100,
        learning_rate=2e-3,
    ),
    _preset("text", _short("text"), steps=3_000),
    _preset("retrieval", _short("retrieval"), batch_size=16),
    _preset("image", published_sizes("image"), evaluate_every=500),
    _preset(
        "pathfinder", replace(published_sizes("pathfinder"), folder="pathfinder-demo", **_DRAWN), evaluate_every=500
    ),
)
