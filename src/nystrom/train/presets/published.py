"""Published settings, and one for a first look, as Python values.

`PRESETS` is keyed by task and name. "nystromformer" and "skyformer" are the settings of the two papers' code for the
Long Range Arena: batch, learning rate, warm-up, steps, how often to evaluate, and what each method is given
(`nystrom.train.presets.nystromformer`, `nystrom.train.presets.skyformer`). "demo" is ours, for a few minutes on two
cores (`nystrom.train.presets.demo`).

The papers share one model: 2 layers of width 64, 128 inside the feed-forward block, 2 heads of 32, pre-norm, mean
pooling, dropout 0.1; AdamW(0.9, 0.999, 1e-6) without weight decay, linear warm-up from zero, then linear decay to zero.

Source: Xiong et al. (2021), arXiv:2102.03902, and its code's LRA/code/lra_config.py; Chen et al. (2021),
arXiv:2111.00035, and its code's code/config.py and code/main.py.
Departs from their code: attention weights are not dropped (only their exact attention did that); the classification
head has 64 units and the model's activation where theirs has 128 and ReLU, but for Retrieval, whose head is theirs;
there is no dropout inside the feed-forward block; all weights start with one deviation, that of torch's own start at
width 64, embeddings too; a method without an entry in `methods` runs with its defaults.
"""

from nystrom.checks import check_names
from nystrom.train.presets.demo import DEMO
from nystrom.train.presets.nystromformer import NYSTROMFORMER
from nystrom.train.presets.preset import DataSizes, MethodSetting, Preset
from nystrom.train.presets.skyformer import SKYFORMER

__all__ = ["PRESETS", "DataSizes", "MethodSetting", "Preset", "find_preset"]

PRESETS: dict[tuple[str, str], Preset] = {
    (preset.task, preset.name): preset for table in (NYSTROMFORMER, SKYFORMER, DEMO) for preset in table.values()
}


def find_preset(task: str, name: str) -> Preset:
    """Look a preset up.

    Raises:
        ValueError: There is none for the task, or none of that name.
    """
    check_names("task", [task], sorted({task for task, _ in PRESETS}))
    check_names("preset", [name], [preset for of, preset in PRESETS if of == task])
    return PRESETS[task, name]
