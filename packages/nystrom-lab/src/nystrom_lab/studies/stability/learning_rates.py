r"""Skyformer's remarks on unstable training: learning rates, seeds and gradient norms.

A model is trained on ListOps with each method, learning rate and seed, by `nystrom_lab.studies.stability.loop`.

- A run has diverged if its loss is not finite, or if the mean loss of its last ten steps is more than a tenth above the
  loss of its first step, or if a gradient norm is above 1,000.
- A run has learned if the mean loss of its last ten steps is at least 15 % below the loss of its first step.
- A run whose loss stays where it began is on a plateau: it has neither diverged nor learned.

Gradient norms are those before clipping.

Claims and the rules that decide them:

- "A slight change in the learning rate may cause the failure of convergence for some models": for at least one method
  of the paper, the share of diverged runs changes by at least a half between two neighbouring learning rates, with at
  least two seeds at each. The claim fails if no share does, and each method has a learning rate at which at least half
  of its runs learned.
- "Replacing the softmax structure with Gaussian kernel somehow alleviates this instability problem": kernelized
  attention and Skyformer each diverge in a smaller share of their runs than self-attention, by what is known of the
  shares (`nystrom_lab.studies.reproduce.known`). The claim fails if either diverges in a larger share.

Gradients through the modified Nyström method on softmax attention are in `nystrom_lab.studies.stability.gradients`.
Beside the paper's methods there is near_far, with as many keys for each query as the others have landmarks; no claim
rests on it.

Source: Chen et al. (2021), arXiv:2111.00035, sections 1 and 5 (results), which print no numbers of this.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from nystrom.whole_files import whole_bytes
from nystrom_lab.data.lra.facts import LRA
from nystrom_lab.data.store.header import HEADER
from nystrom_lab.measure.rows import Row, cpu_name, new_row
from nystrom_lab.report.plots.canvas import PAGE, REFERENCE, figure_of, method_look, plain_numbers
from nystrom_lab.report.summary import Verdict
from nystrom_lab.report.table import Table
from nystrom_lab.studies.reproduce.known import share_of
from nystrom_lab.studies.reproduce.study import Part, Plan, Setting, Study
from nystrom_lab.studies.stability.arena import ArenaTask, new_model, preset_of, size_of
from nystrom_lab.studies.stability.loop import Trace, train_plainly, validation_batches
from nystrom_lab.training.presets.published import DRAWN_BY_SEGMENTS
from nystrom_lab.training.presets.sizes import DataSizes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

METHODS = ("softmax", "kernelized", "nystrom", "skyformer", "skyformer_softmax", "near_far")
_KERNELS = ("kernelized", "skyformer")
# Short enough that training leaves its first plateau within some hundred steps.
_SHORT = DataSizes(folder="listops", train=4_800, val=256, test=1, min_length=64, max_length=128)
_NORM, _LOSS, _DIVERGED, _ACCURACY = "largest gradient norm", "last loss over first", "diverged", "best accuracy"
_TOO_LARGE, _HIGHER, _LOWER = 1e3, 1.1, 0.85


class _Training(NamedTuple):
    steps: int
    batch: int
    every: int
    landmarks: int
    preset: str


_SMALL = _Training(steps=160, batch=16, every=40, landmarks=32, preset="demo")


def _plan(setting: Setting) -> Plan:
    paper, preset = setting.size == "paper", preset_of("listops")
    source = ArenaTask("listops", _folder(setting), preset.data if paper else _SHORT)
    rates = (1e-4, 3e-4, 1e-3) if paper else (1e-3, 5e-3, 2e-2)
    seeds = 3 if paper else 2
    training = _Training(preset.steps, preset.batch_size, preset.evaluate_every, 128, "skyformer") if paper else _SMALL
    parts = [
        Part(f"{method}-{rate:g}-seed={seed}", partial(_measure, source, training, method, rate, seed))
        for rate, seed, method in product(rates, range(seeds), METHODS)
    ]
    said = {
        "task": source.name,
        "methods": " ".join(METHODS),
        "learning rates": " ".join(f"{rate:g}" for rate in rates),
        "seeds": str(seeds),
        "training": f"{training.steps} steps of {training.batch}, {training.landmarks} landmarks",
    }
    differs = f"ListOps alone, five methods and near_far, and three learning rates instead of one; {DRAWN_BY_SEGMENTS}"
    if not paper:
        differs += (
            f"; sequences to {_SHORT.max_length} tokens instead of 2,000, {training.steps} steps of {training.batch} "
            f"instead of 50,000 of {preset.batch_size}, {training.landmarks} landmarks instead of 128, larger learning "
            "rates and start weights"
        )
    return Plan(parts, said, differs)


def _folder(setting: Setting) -> Path | None:
    """The user's prepared ListOps, at the paper's size only."""
    if setting.size == "small" or setting.data is None:
        return None
    folder = setting.data / "listops"
    if not (folder / HEADER).is_file():
        raise ValueError(f"--data {setting.data} holds no prepared listops: leave --data out, and it is generated.")
    return folder


def _measure(
    source: ArenaTask, training: _Training, method: str, rate: float, seed: int, folder: Path
) -> Iterable[Row]:
    options = size_of(method, training.landmarks)
    model = new_model(source, method, seed=seed, options=options, preset=training.preset)
    if torch.cuda.is_available():
        model.to("cuda")  # pyright: ignore[reportArgumentType] (transformers types it away)
    validation = source.open("val", folder)
    trace = train_plainly(
        model,
        source,
        source.open("train", folder),
        validation_batches(source, validation, batch=64, count=len(validation) // 64),
        learning_rate=rate,
        steps=training.steps,
        batch=training.batch,
        every=training.every,
        seed=seed,
    )
    with whole_bytes(_file(folder, method, rate, seed)) as file:
        np.savez(file, **trace._asdict())
    return list(_rows(trace, source, method, rate, seed, training.batch))


def _rows(trace: Trace, source: ArenaTask, method: str, rate: float, seed: int, batch: int) -> Iterable[Row]:
    norm, ratio = _largest(trace.norm), _last_over_first(trace.loss)
    diverged = not (ratio <= _HIGHER and norm <= _TOO_LARGE)
    best = float(trace.accuracy.max(initial=0))
    for quantity, value in ((_NORM, norm), (_LOSS, ratio), (_DIVERGED, float(diverged)), (_ACCURACY, best)):
        yield new_row(
            study="",
            quantity=quantity,
            method=method,
            value=value,
            unit="",
            n=source.sizes.max_length,
            facts={"learning_rate": f"{rate:g}", "b": batch, "steps": len(trace.loss)},
            seed=seed,
            device=torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_name(),
            note="" if math.isfinite(value) else "missing or not finite in some step",
        )


def _largest(norm: np.ndarray) -> float:
    """The largest norm; infinite where one is missing or not finite."""
    return float(norm.max()) if np.isfinite(norm).all() else math.inf


def _last_over_first(loss: np.ndarray) -> float:
    """Mean loss of the last ten steps over that of the first; infinite where a loss is missing or not finite."""
    return float(loss[-10:].mean() / loss[0]) if np.isfinite(loss).all() else math.inf


def _file(folder: Path, method: str, rate: float, seed: int | None) -> Path:
    return folder / f"trace-{method}-{rate:g}-{seed}.npz"


def _rate(row: Row) -> float:
    return float(row.facts["learning_rate"])


def _values(rows: Sequence[Row], quantity: str) -> dict[str, dict[float, dict[int | None, float]]]:
    """Values of a quantity by method, learning rate and seed."""
    found: dict[str, dict[float, dict[int | None, float]]] = {}
    for row in rows:
        if row.quantity == quantity:
            found.setdefault(row.method, {}).setdefault(_rate(row), {})[row.seed] = row.value
    return found


def _tables(rows: Sequence[Row]) -> Sequence[Table]:
    titles = {
        _DIVERGED: "diverged runs",
        _NORM: "largest gradient norm, median over the seeds",
        _ACCURACY: "best validation accuracy, mean over the seeds",
    }
    tables = []
    for quantity, title in titles.items():
        values = _values(rows, quantity)
        rates = sorted({rate for each in values.values() for rate in each})
        lines = [
            [method, *(_cell(quantity, list(each[rate].values())) if rate in each else "–" for rate in rates)]
            for method, each in values.items()
        ]
        tables.append(Table(title, ["method", *(f"lr={rate:g}" for rate in rates)], lines))
    return tables


def _cell(quantity: str, values: Sequence[float]) -> str:
    if quantity == _DIVERGED:
        return f"{sum(values):.0f} of {len(values)}"
    return f"{median(values):.3g}" if quantity == _NORM else f"{fmean(values):.1%}"


def _verdicts(rows: Sequence[Row]) -> Sequence[Verdict]:
    diverged, losses = _values(rows, _DIVERGED), _values(rows, _LOSS)
    runs = {method: [value for of in each.values() for value in of.values()] for method, each in diverged.items()}
    learned = {
        method: {rate: [loss <= _LOWER for loss in of.values()] for rate, of in each.items()}
        for method, each in losses.items()
    }
    counts = ", ".join(
        f"{method} {sum(of):.0f} and {sum(map(sum, learned.get(method, {}).values()))} of {len(of)}"
        for method, of in runs.items()
    )
    numbers = f"diverged and learned runs: {counts}." if counts else "not measured."
    return [
        Verdict(
            "A change in the learning rate makes some methods fail to converge.", _fails(diverged, learned), numbers
        ),
        Verdict("A Gaussian kernel in place of softmax alleviates the instability.", _alleviates(runs), numbers),
    ]


def _fails(
    diverged: Mapping[str, Mapping[float, Mapping[int | None, float]]],
    learned: Mapping[str, Mapping[float, Sequence[bool]]],
) -> bool | None:
    """Whether a change of the learning rate makes runs diverge; None where too few runs learned to say no."""
    methods = [method for method in diverged if method != "near_far"]
    shares = [
        [fmean(diverged[method][rate].values()) for rate in sorted(diverged[method])]
        for method in methods
        if all(len(of) > 1 for of in diverged[method].values())
    ]
    if any(abs(b - a) >= 0.5 for each in shares for a, b in pairwise(each)):
        return True
    whole = bool(shares) and len(shares) == len(methods) and all(len(each) > 1 for each in shares)
    able = all(any(fmean(of) >= 0.5 for of in learned.get(method, {}).values()) for method in methods)
    return False if whole and able else None


def _alleviates(runs: Mapping[str, Sequence[float]]) -> bool | None:
    known = {method: share_of(fmean(of), len(of)) for method, of in runs.items()}
    if not {"softmax", *_KERNELS} <= known.keys():
        return None
    exact = known["softmax"]
    if any(known[method].low > exact.high for method in _KERNELS):
        return False
    return True if all(known[method].high < exact.low for method in _KERNELS) else None


def _figures(rows: Sequence[Row], folder: Path) -> "Mapping[str, Figure]":
    values = _values(rows, _NORM)
    rates = sorted({rate for each in values.values() for rate in each})
    figure = figure_of(PAGE, 4.9)
    grid = figure.subplots(2, len(rates), squeeze=False, sharey="row")
    for (norms, accuracies), rate in zip(grid.T, rates, strict=True):
        for method, each in values.items():
            look = method_look(method)
            for place, seed in enumerate(sorted(each.get(rate, {}), key=lambda seed: seed or 0)):
                trace = np.load(_file(folder, method, rate, seed))
                style = {"color": look.colour, "linestyle": look.line, "alpha": 0.9 if place == 0 else 0.4}
                steps = np.arange(1, len(trace["norm"]) + 1)
                norms.plot(steps, trace["norm"], label=method if place == 0 else None, **style)
                accuracies.plot(trace["seconds"], 100 * trace["accuracy"], marker=look.marker, markersize=3, **style)
        norms.set_yscale("log")
        plain_numbers(norms, "y")
        norms.set_title(f"learning rate {rate:g}")
        norms.set_xlabel("step")
        accuracies.axhline(100 / LRA["listops"].num_labels, color=REFERENCE, linewidth=0.8, linestyle=(0, (1, 2)))
        accuracies.set_xlabel("seconds of training")
        for axes in (norms, accuracies):
            axes.grid(True)
    grid[0][0].set_ylabel("gradient norm")
    grid[1][0].set_ylabel("validation accuracy (%)")
    figure.legend(
        *grid[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=5,
        title="pale: further seeds; dotted: chance", title_fontsize=7.5,
    )  # fmt: skip
    return {"": figure}


STUDIES = {"learning-rates": Study(plan=_plan, tables=_tables, verdicts=_verdicts, figures=_figures)}
