"""A first look at each task: few steps on short sequences, for two cores and minutes.

Larger start weights and learning rates than the papers' leave sooner the plateau that training begins on; on Text it
lasts longer than 1,000 steps. Pictures cannot be made shorter: of Image and Pathfinder the batches are smaller and the
steps fewer instead. The validation splits of Text and Retrieval are large, so those are evaluated seldom.
"""

from nystrom.train.presets.data import IMAGE, LISTOPS_DEMO, PATHFINDER_DEMO, RETRIEVAL_DEMO, TEXT_DEMO
from nystrom.train.presets.preset import MethodSetting, Preset

_METHODS = {
    "nystrom": MethodSetting({"num_landmarks": 32}, conv_kernel_size=35),
    "skyformer": MethodSetting({"num_landmarks": 32}),
}

DEMO: dict[str, Preset] = {
    "listops": Preset(
        task="listops",
        name="demo",
        source="nystrom",
        data=LISTOPS_DEMO,
        batch_size=32,
        learning_rate=2e-3,
        warmup_steps=100,
        steps=700,
        evaluate_every=100,
        log_every=20,
        initializer_range=0.1,
        methods=_METHODS,
    ),
    "text": Preset(
        task="text",
        name="demo",
        source="nystrom",
        data=TEXT_DEMO,
        batch_size=32,
        learning_rate=1e-3,
        warmup_steps=100,
        steps=3_000,
        evaluate_every=1_000,
        log_every=20,
        initializer_range=0.1,
        methods=_METHODS,
    ),
    "retrieval": Preset(
        task="retrieval",
        name="demo",
        source="nystrom",
        data=RETRIEVAL_DEMO,
        batch_size=16,
        learning_rate=1e-3,
        warmup_steps=100,
        steps=1_000,
        evaluate_every=1_000,
        log_every=20,
        initializer_range=0.1,
        methods=_METHODS,
    ),
    "image": Preset(
        task="image",
        name="demo",
        source="nystrom",
        data=IMAGE,
        batch_size=32,
        learning_rate=1e-3,
        warmup_steps=100,
        steps=1_000,
        evaluate_every=500,
        log_every=20,
        initializer_range=0.1,
        methods=_METHODS,
    ),
    "pathfinder": Preset(
        task="pathfinder",
        name="demo",
        source="nystrom",
        data=PATHFINDER_DEMO,
        batch_size=32,
        learning_rate=1e-3,
        warmup_steps=100,
        steps=1_000,
        evaluate_every=500,
        log_every=20,
        initializer_range=0.1,
        methods=_METHODS,
    ),
}
