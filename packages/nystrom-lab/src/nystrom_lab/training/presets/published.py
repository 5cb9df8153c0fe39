"""Published settings, and a demo, as Python values.

`PRESETS` is keyed by task and name. "nystromformer" and "skyformer" are the settings of the two papers' code for the
Long Range Arena: batch, learning rate, warm-up, steps, how often to evaluate, and the options of each method
(`nystrom_lab.training.presets.nystromformer`, `nystrom_lab.training.presets.skyformer`). "nystromformer-1000" and
"skyformer-1000" are Text again, cut at 1,000 bytes. "modern" has later improvements, and "modern-small" has them for
one core (`nystrom_lab.training.presets.modern`). "official" is that of the code of the Long Range Arena
(`nystrom_lab.training.presets.official`). "demo" is ours, for a few minutes on two cores
(`nystrom_lab.training.presets.demo`).

The papers share one model: 2 layers of width 64, 128 inside the feed-forward block, 2 heads of 32, pre-norm, mean
pooling, dropout 0.1; AdamW(0.9, 0.999, 1e-6) without weight decay, linear warm-up, then linear decay. Head, dropout
and initial values are those of their code, the design "authors" of `nystrom.models.design`. Linformer's projections are
those of each paper's own code: see `nystrom_lab.training.presets.nystromformer.linformer`.

Source: Xiong et al. (2021), arXiv:2102.03902, and its code's LRA/code; Chen et al. (2021), arXiv:2111.00035, and its
code's code/config.py and code/main.py.
Departs from their code:

- the mean that the head reads is over the real tokens, where theirs is over all positions, of which padding counts as
  zeros: theirs is ours times the share of real tokens, so that it depends on the padding, which no result here does;
- linear attention is divided by its sum of weights, where Nyströmformer's code has no denominator and divides by the
  square root of the positions, padding included;
- there is no dropout of attention weights, which their exact and kernelized attention have, and other methods of
  Skyformer's code too; `--drop-weights True` is that of exact and kernelized attention;
- the learning rate rises from 0 and falls to 0, where theirs rises from 1/25 of its peak and falls to 1/250,000 of it
  (torch's OneCycleLR);
- in mixed precision attention is computed in bfloat16, its inverse and its sums in float32, where theirs is computed in
  float32 as a whole; `--precision float32` computes all in float32;
- the number of Reformer's buckets is 2 n / 64 itself, where theirs is the power of two below it for n padded to a power
  of two;
- Skyformer's landmarks are drawn one from each segment, where Definition 1 of its paper draws them independently;
- a method without an entry in `methods` runs with its defaults.
"""

from nystrom.checks import check_names
from nystrom_lab.training.presets.demo import DEMO
from nystrom_lab.training.presets.modern import MODERN
from nystrom_lab.training.presets.nystromformer import NYSTROMFORMER
from nystrom_lab.training.presets.official import OFFICIAL
from nystrom_lab.training.presets.preset import MethodSetting, Preset
from nystrom_lab.training.presets.sizes import DataSizes
from nystrom_lab.training.presets.skyformer import SKYFORMER

__all__ = ["PRESETS", "DataSizes", "MethodSetting", "Preset", "find_preset"]

# The departures above in short, for what is measured with the papers' presets.
DEPARTURES = (
    "pooling of real tokens alone, a denominator in linear attention, no dropped attention weights, a learning rate "
    "that begins and ends at 0"
)
# That of Skyformer's own method.
DRAWN_BY_SEGMENTS = "landmarks of Skyformer drawn one from each segment instead of independently"
PRESETS: dict[tuple[str, str], Preset] = {
    (preset.task, preset.name): preset for preset in (*NYSTROMFORMER, *SKYFORMER, *MODERN, *OFFICIAL, *DEMO)
}


def find_preset(task: str, name: str) -> Preset:
    """Look up a preset.

    Raises:
        ValueError: The task has no presets, or none of that name.
    """
    check_names("task", [task], sorted({task for task, _ in PRESETS}))
    check_names("preset", [name], [preset for of, preset in PRESETS if of == task])
    return PRESETS[task, name]
