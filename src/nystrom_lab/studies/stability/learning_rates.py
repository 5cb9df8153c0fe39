r"""Fig. 2 of Skyformer and its remarks on instability: learning rates, seeds and gradient norms.

A model is trained on ListOps with each method, learning rate and seed by `nystrom_lab.studies.stability.loop`. A run
has diverged if its loss is not finite, or the mean loss of its last ten steps is more than a tenth above the loss of
its first step, or a gradient norm is above 1,000; a loss that stays where it began is a plateau. Gradient norms are
those before clipping.

Claims and the rules that decide on them; pairs are runs of two methods with the same learning rate and seed:

- The modified Nyström method on self-attention "suffers a more severe gradient explosion issue than usual
  transformers": the median over the pairs of its largest gradient norm over self-attention's is at least 2. A norm that
  is not finite counts as endless.
- "A slight change in the learning rate may cause the failure of convergence for some models": for at least one method
  of the paper the share of diverged runs changes by at least a half between two neighbouring learning rates.
- "Replacing the softmax structure with Gaussian kernel somehow alleviates this instability problem": kernelized
  attention and Skyformer have no more diverged runs than self-attention, and the medians over the pairs of their
  largest gradient norms over self-attention's are below 1.

Beside the paper's methods is near_far with as many keys for each query as the others have landmarks; no claim rests on
it.

Source: Chen et al. (2021), arXiv:2111.00035, sections 1, 4.5 (remark) and 5 (results) and Fig. 2, which print no
numbers of this.
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
from nystrom_lab.studies.reproduce.study import Part, Plan, Setting, Study
from nystrom_lab.studies.stability.arena import ArenaTask, new_model, preset_of, size_of
from nystrom_lab.studies.stability.loop import Trace, train_plainly, validation_batches
from nystrom_lab.training.presets.sizes import DataSizes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

METHODS = ("softmax", "kernelized", "nystrom", "skyformer", "skyformer_softmax", "near_far")
# Short enough that some hundred steps leave the plateau that training begins on.
_SHORT = DataSizes(folder="listops", train=4_800, val=256, test=1, min_length=64, max_length=128)
_NORM, _LOSS, _DIVERGED, _ACCURACY = "largest gradient norm", "last loss over first", "diverged", "best accuracy"
_TOO_LARGE, _HIGHER = 1e3, 1.1


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
    differs = "ListOps alone, five methods and near_far, and three learning rates instead of one"
    if not paper:
        differs += (
            f"; sequences to {_SHORT.max_length} tokens instead of 2,000, {training.steps} steps of {training.batch} "
            f"instead of 50,000 of {preset.batch_size}, {training.landmarks} landmarks instead of 128, larger learning "
            "rates and start weights"
        )
    return Plan(parts, said, differs)


def _folder(setting: Setting) -> Path | None:
    """The prepared ListOps of a user, at the paper's size alone."""
    if setting.size == "small" or setting.data is None:
        return None
    folder = setting.data / "listops"
    if not (folder / HEADER).is_file():
        raise ValueError(f"--data {setting.data} holds no prepared listops: leave it out, and it is drawn.")
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
        )


def _largest(norm: np.ndarray) -> float:
    """Endless where a norm is missing or not finite."""
    return float(norm.max()) if np.isfinite(norm).all() else math.inf


def _last_over_first(loss: np.ndarray) -> float:
    """Mean loss of the last ten steps over that of the first; endless where one is missing or not finite."""
    return float(loss[-10:].mean() / loss[0]) if np.isfinite(loss).all() else math.inf


def _file(folder: Path, method: str, rate: float, seed: int | None) -> Path:
    return folder / f"trace-{method}-{rate:g}-{seed}.npz"


def _rate(row: Row) -> float:
    return float(row.facts["learning_rate"])


def _values(rows: Sequence[Row], quantity: str) -> dict[str, dict[float, dict[int | None, float]]]:
    """By method, learning rate and seed."""
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
    norms, diverged = _values(rows, _NORM), _values(rows, _DIVERGED)
    over = {method: _over_softmax(norms, method) for method in METHODS[1:]}
    shares = {method: [fmean(each[rate].values()) for rate in sorted(each)] for method, each in diverged.items()}
    steepest = {m: max((abs(b - a) for a, b in pairwise(each)), default=0.0) for m, each in shares.items()}
    sums = {method: sum(sum(seeds.values()) for seeds in each.values()) for method, each in diverged.items()}
    kernels, variant = ("kernelized", "skyformer"), over["skyformer_softmax"]
    changed = [method for method, step in steepest.items() if step >= 0.5 and method != "near_far"]
    whole = "softmax" in sums and all(method in sums and over[method] for method in kernels)
    several = any(len(each) > 1 for each in shares.values())
    return [
        Verdict(
            "The modified Nyström method on self-attention suffers a more severe gradient explosion.",
            median(variant) >= 2 if variant else None,
            f"its largest gradient norm is {median(variant):.2g} times self-attention's in the median of "
            f"{len(variant)} pairs of runs."
            if variant
            else "there are no pairs of runs.",
        ),
        Verdict(
            "A change in the learning rate makes some methods fail to converge.",
            bool(changed) if several else None,
            f"the share of diverged runs changes by a half or more for {', '.join(changed) or 'no method'}; "
            "diverged are " + ", ".join(f"{total:.0f} ({method})" for method, total in sums.items()) + ".",
        ),
        Verdict(
            "A Gaussian kernel in place of softmax alleviates the instability.",
            all(sums[m] <= sums["softmax"] and median(over[m]) < 1 for m in kernels) if whole else None,
            "largest gradient norms over self-attention's: "
            + ", ".join(f"{median(over[m]):.2g} ({m}, {sums[m]:.0f} diverged)" for m in kernels)
            + f"; of self-attention {sums['softmax']:.0f} diverged."
            if whole
            else "not all three methods were measured.",
        ),
    ]


def _over_softmax(norms: Mapping[str, Mapping[float, Mapping[int | None, float]]], method: str) -> list[float]:
    """Of each pair of runs; two that both explode are equal."""
    base = norms.get("softmax", {})
    pairs = [
        (value, base[rate][seed])
        for rate, seeds in norms.get(method, {}).items()
        for seed, value in seeds.items()
        if seed in base.get(rate, {})
    ]
    return [1.0 if ours == theirs else ours / theirs for ours, theirs in pairs]


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
