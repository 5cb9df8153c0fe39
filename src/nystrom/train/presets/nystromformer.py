"""The settings of the Nyströmformer paper for the Long Range Arena.

Its code lists 32, 64, 128 and 256 landmarks for every task, and the paper does not say which gave its table: here they
are 128.

Source: Xiong et al. (2021), arXiv:2102.03902, and its code's LRA/code/lra_config.py.
Departs from that code: the validation split is evaluated as a whole, on Text every 1,000 and on Retrieval every 1,500
steps, where it was every 500 and 300; as often as there it would take about as long as the training.
"""

from nystrom.train.presets.data import IMAGE, LISTOPS, PATHFINDER, RETRIEVAL, TEXT
from nystrom.train.presets.preset import MethodSetting, Preset

_NAME, _SOURCE = "nystromformer", "Xiong et al. 2021, arXiv:2102.03902"


def _methods(max_length: int) -> dict[str, MethodSetting]:
    return {
        "nystrom": MethodSetting({"num_landmarks": 128, "pinv_steps": 6}, conv_kernel_size=35),
        "linformer": MethodSetting({"num_features": 256, "max_length": max_length}),
        "performer": MethodSetting({"num_features": 256}),
        "reformer": MethodSetting({"num_hashes": 2, "chunk_size": 64}),
        "linear": MethodSetting({"feature_map": "elu"}),
    }


NYSTROMFORMER: dict[str, Preset] = {
    "listops": Preset(
        task="listops",
        name=_NAME,
        source=_SOURCE,
        data=LISTOPS,
        batch_size=32,
        learning_rate=1e-4,
        warmup_steps=1_000,
        steps=5_000,
        evaluate_every=50,
        log_every=50,
        methods=_methods(2_000),
    ),
    "text": Preset(
        task="text",
        name=_NAME,
        source=_SOURCE,
        data=TEXT,
        batch_size=32,
        learning_rate=1e-4,
        warmup_steps=8_000,
        steps=20_000,
        evaluate_every=1_000,
        log_every=100,
        methods=_methods(4_000),
    ),
    "retrieval": Preset(
        task="retrieval",
        name=_NAME,
        source=_SOURCE,
        data=RETRIEVAL,
        batch_size=32,
        learning_rate=1e-4,
        warmup_steps=800,
        steps=30_000,
        evaluate_every=1_500,
        log_every=100,
        methods=_methods(4_000),
    ),
    "image": Preset(
        task="image",
        name=_NAME,
        source=_SOURCE,
        data=IMAGE,
        batch_size=256,
        learning_rate=1e-4,
        warmup_steps=175,
        steps=35_000,
        evaluate_every=175,
        log_every=175,
        methods=_methods(1_024),
    ),
    "pathfinder": Preset(
        task="pathfinder",
        name=_NAME,
        source=_SOURCE,
        data=PATHFINDER,
        batch_size=256,
        learning_rate=1e-4,
        warmup_steps=312,
        steps=62_400,
        evaluate_every=312,
        log_every=104,
        methods=_methods(1_024),
    ),
}
