"""The settings of the Nyströmformer paper for the Long Range Arena.

Its code lists 32, 64, 128 and 256 landmarks for every task, and the paper does not say which of them its table is for:
here it is 128; `nystrom lra run --methods nystrom-64` chooses another number.

Text comes in two lengths. The paper's table says 4K, but its released code cuts a review at 1,000 bytes
(LRA/datasets/text.py): "nystromformer" has 4,000 and "nystromformer-1000" has 1,000, with the same training.

Source: Xiong et al. (2021), arXiv:2102.03902, and its code's LRA/code/lra_config.py.
Departs from that code: the validation split is evaluated as a whole, on Text every 1,000 and on Retrieval every 1,500
steps instead of every 500 and 300, which would take about as long as the training.
`nystrom_lab.training.presets.published` describes what both papers' presets have in common.
"""

from collections.abc import Mapping

from nystrom.attention.method_names import reformer_buckets
from nystrom_lab.training.presets.preset import MethodSetting, Preset
from nystrom_lab.training.presets.sizes import published_sizes


def _methods(length: int) -> Mapping[str, MethodSetting]:
    return {
        "nystrom": MethodSetting({"num_landmarks": 128, "pinv_steps": 6}, conv_kernel_size=35),
        "linformer": linformer(256, length, frozen=False),
        "performer": MethodSetting({"num_features": 256}),
        "reformer": reformer(length),
        "linear": MethodSetting({"feature_map": "elu"}),
    }


def linformer(num_features: int, length: int, *, frozen: bool | None = None) -> MethodSetting:
    """Linformer as in the code of both papers: one projection per head, for keys and values.

    Nyströmformer's code trains it and shares it between layers; Skyformer's keeps it fixed at its random initial
    values, one per layer.

    Args:
        num_features: Mixtures of the tokens.
        length: Positions of the model.
        frozen: Whether it stays fixed at its random initial values, as in Skyformer's code; None outside the design
            "authors".
    """
    options = {
        "num_features": num_features,
        "max_length": length,
        "per_head": True,
        "share_key_value": True,
        "init_std": 0.02,
    }
    return MethodSetting(options if frozen is None else options | {"frozen": frozen}, share_projections=not frozen)


def reformer(length: int) -> MethodSetting:
    """Reformer as in the code of both papers: 2 n / 64 buckets, and queries attend across them."""
    return MethodSetting(
        {"num_hashes": 2, "chunk_size": 64, "num_buckets": reformer_buckets(length), "across_buckets": True}
    )


def _preset(
    task: str,
    *,
    steps: int,
    warmup_steps: int,
    evaluate_every: int,
    log_every: int,
    batch_size: int = 32,
    max_length: int | None = None,
) -> Preset:
    return Preset(
        task=task,
        name="nystromformer" if max_length is None else f"nystromformer-{max_length}",
        source="Xiong et al. 2021, arXiv:2102.03902",
        data=published_sizes(task, max_length=max_length),
        methods=_methods,
        batch_size=batch_size,
        learning_rate=1e-4,
        warmup_steps=warmup_steps,
        steps=steps,
        evaluate_every=evaluate_every,
        log_every=log_every,
        design="authors",
    )


_TEXT = {"steps": 20_000, "warmup_steps": 8_000, "evaluate_every": 1_000, "log_every": 100}

NYSTROMFORMER: tuple[Preset, ...] = (
    _preset("listops", steps=5_000, warmup_steps=1_000, evaluate_every=50, log_every=50),
    _preset("text", **_TEXT),
    _preset("text", **_TEXT, max_length=1_000),
    _preset("retrieval", steps=30_000, warmup_steps=800, evaluate_every=1_500, log_every=100),
    _preset("image", steps=35_000, warmup_steps=175, evaluate_every=175, log_every=175, batch_size=256),
    _preset("pathfinder", steps=62_400, warmup_steps=312, evaluate_every=312, log_every=104, batch_size=256),
)
