r"""The experiment of Skyformer's Appendix F: how far the output moves when a training step moves the weights.

With the weights $W_0$ at the start and $W_i$ after step i, the instability score of step i = 1 ... 20 is
$$\tau_i = \frac{\|f(x_i, W_i) - f(x_i, W_{i-1})\|_F^2}{\|W_i - W_{i-1}\|_F^2},$$
where $x_i$ is the batch of the step and f the embedding after two layers: the last hidden states of the real tokens,
without dropout. The norm of the weights is over all weights that f depends on. The score of a method is divided by that
of self-attention in the same step, with the same initial weights and batches, and the 20 ratios are averaged. A ratio
below 1 means that the method is more stable than self-attention.

The learning rate follows torch's OneCycleLR, as in the authors' code: it is about a 25th of its peak in these steps.

Claims and the rules that decide them. A mean over s seeds is known to two of its standard errors, the standard
deviation / sqrt(s) each; one seed decides nothing.

- "Both kernelized attention and Skyformer consistently have a lower instability score than self-attention": in every
  measured task the mean ratio of each over the seeds is below 1.
- Nyströmformer's "fluctuates around 1 in all the tasks": in every measured task the mean ratio of Nyström attention
  lies between 0.9 and 1.1.

Source: Chen et al. (2021), arXiv:2111.00035, section 4.1, and its Appendix F, in the file that NeurIPS publishes beside
the paper.
Beside the paper's methods there is near_far with its defaults; no claim rests on it.
Departs from the paper: float32 instead of mixed precision, no dropout of attention weights, and landmarks drawn one
from each segment instead of independently.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from nystrom.whole_files import whole_bytes
from nystrom_lab.bench.training_step import TrainingStep
from nystrom_lab.data.lra.facts import LRA
from nystrom_lab.measure.rows import Row
from nystrom_lab.report.plots.canvas import PAGE, REFERENCE, figure_of, method_look
from nystrom_lab.report.printed import SKYFORMER_APPENDIX_F
from nystrom_lab.report.summary import Verdict
from nystrom_lab.report.table import Table
from nystrom_lab.studies.reproduce.known import Known, most
from nystrom_lab.studies.reproduce.spread import spread_row
from nystrom_lab.studies.reproduce.study import Part, Plan, Setting, Study
from nystrom_lab.studies.stability.arena import (
    ArenaTask,
    Batch,
    find_sources,
    new_model,
    new_optimizer,
    preset_of,
    random_batches,
    sources_text,
)
from nystrom_lab.training.data.tasks import Model
from nystrom_lab.training.presets.published import DRAWN_BY_SEGMENTS
from nystrom_lab.training.presets.sizes import DataSizes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STEPS = 20
METHODS = ("softmax", "nystrom", "kernelized", "skyformer", "near_far")
_SCORE, _RATIO = "instability score", "ratio to self-attention"
# The small size divides the paper's batch by this.
_PART = 16


def _plan(setting: Setting) -> Plan:
    paper = setting.size == "paper"
    batches = {task: preset_of(task).batch_size // (1 if paper else _PART) for task in LRA}
    sources = find_sources(setting.data, {task: _drawn(task, batches[task]) for task in ("listops", "pathfinder")})
    missing = [task for task in LRA if task not in {source.task for source in sources}]
    if paper and missing:
        raise ValueError(
            f"--size paper needs {', '.join(missing)} in --data: make them with `nystrom data prepare`, and name the "
            "folder that holds them."
        )
    seeds = range(3)
    parts = [
        Part(f"{source.task}-seed={seed}", partial(_measure, source, batches[source.task], seed))
        for source in sources
        for seed in seeds
    ]
    said = {
        "tasks": sources_text(sources),
        "methods": " ".join(METHODS),
        "batches": " ".join(str(batches[source.task]) for source in sources),
        "seeds": str(len(seeds)),
        "steps": str(STEPS),
    }
    differs = ["float32 instead of mixed precision", DRAWN_BY_SEGMENTS]
    if not paper:
        differs.append(f"a {_PART}th of the paper's batches")
    if missing:
        differs.append(f"without {', '.join(missing)}, which are not drawn")
    return Plan(parts, said, "; ".join(differs))


def _drawn(task: str, batch: int) -> DataSizes:
    data = preset_of(task).data
    return DataSizes(
        folder=task, train=STEPS * batch, val=1, test=1, min_length=data.min_length, max_length=data.max_length
    )


def _measure(source: ArenaTask, batch: int, seed: int, folder: Path) -> Iterable[Row]:
    split = source.open("train", folder)
    scores: dict[str, Tensor] = {}
    for method in METHODS:
        model = new_model(source, method, seed=seed)
        batches = random_batches(source, split, batch=batch, count=STEPS, seed=seed)
        scores[method] = instability_scores(model, batches, task=source.task, seed=seed)
    arrays: dict[str, Any] = {method: values.numpy() for method, values in scores.items()}
    with whole_bytes(_file(folder, source.task, seed)) as file:
        np.savez(file, **arrays)
    facts, n = {"task": source.task, "b": batch, "steps": STEPS}, source.sizes.max_length
    for method, values in scores.items():
        yield spread_row(_SCORE, method, values, n=n, facts=facts, seed=seed)
        yield spread_row(_RATIO, method, values / scores["softmax"], n=n, facts=facts, seed=seed)


def _file(folder: Path, task: str, seed: int) -> Path:
    return folder / f"scores-{task}-{seed}.npz"


def instability_scores(model: Model, batches: Iterable[Batch], *, task: str, seed: int) -> Float[Tensor, " steps"]:
    """Train for one step on each batch, and return the score of each step.

    Args:
        model: The model; it is trained in place.
        batches: One batch per step.
        task: The task, whose settings are the paper's.
        seed: Seed of dropout and the method's draws.
    """
    preset, scores = preset_of(task), []
    optimizer = new_optimizer(model, preset, preset.learning_rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer,
        max_lr=preset.learning_rate,
        pct_start=preset.warmup_steps / preset.steps,
        anneal_strategy="linear",
        total_steps=preset.steps,
    )
    encoder, training = model.nystromformer, TrainingStep(model, optimizer, clip_value=preset.clip_value)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for batch in batches:
            before, weights = _embedding(encoder, batch), [p.detach().clone() for p in encoder.parameters()]
            model.train()
            training.step(batch)
            schedule.step()
            moved = (_embedding(encoder, batch) - before).double().square().sum()
            pairs = zip(encoder.parameters(), weights, strict=True)
            scores.append(moved / sum((new.detach() - old).double().square().sum() for new, old in pairs))
    return torch.stack(scores)


@torch.no_grad()
def _embedding(encoder: nn.Module, batch: Batch) -> Float[Tensor, "b n w"]:
    """f: the last hidden states, zero for tokens that are not real."""
    encoder.eval()
    ids, keep = (batch.get(name) for name in ("input_ids", "attention_mask"))
    assert ids is not None
    # A pair of documents is two sequences.
    ids, keep = ids.flatten(0, -2), None if keep is None else keep.flatten(0, -2)
    x = encoder(ids, keep).last_hidden_state
    return x if keep is None else x * keep[..., None]


def _ratios(rows: Sequence[Row]) -> dict[str, dict[str, list[float]]]:
    """Mean ratios of the seeds, by task and method."""
    found: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        if row.quantity == _RATIO and row.method != "softmax":
            found.setdefault(_task(row), {}).setdefault(row.method, []).append(row.value)
    return found


def _task(row: Row) -> str:
    return row.facts["task"]


def _tables(rows: Sequence[Row]) -> Sequence[Table]:
    ratios = _ratios(rows)
    lines = [
        [method, *(f"{fmean(ratios[t][method]):.2f} / {_printed(method, t)}" for t in ratios)]
        for method in _measured(ratios)
    ]
    return [
        Table("mean ratio of the instability score to self-attention's, here / printed", ["method", *ratios], lines)
    ]


def _measured(ratios: Mapping[str, Mapping[str, object]]) -> list[str]:
    """The methods, other than self-attention, that every task has."""
    return [method for method in METHODS[1:] if all(method in each for each in ratios.values())]


def _printed(method: str, task: str) -> str:
    return f"{SKYFORMER_APPENDIX_F[method][task]:.2f}" if method in SKYFORMER_APPENDIX_F else "–"


def _verdicts(rows: Sequence[Row]) -> Sequence[Verdict]:
    ratios = _ratios(rows)

    def said(method: str) -> str:
        return f"{method} " + ", ".join(
            f"{fmean(each[method]):.2f}, {known.low:.2f} to {known.high:.2f} ({task})"
            for task, each in ratios.items()
            for known in (_known(each[method]),)
        )

    kernels = [
        _known(each[method]).within(most=1) for each in ratios.values() for method in ("kernelized", "skyformer")
    ]
    nystrom = [_known(each["nystrom"]).within(0.9, 1.1) for each in ratios.values()]
    return [
        Verdict(
            "Kernelized attention and Skyformer have a lower instability score than self-attention in every task.",
            most(kernels),
            f"{said('kernelized')}; {said('skyformer')}.",
        ),
        Verdict(
            "Nyströmformer's fluctuates around 1 in all the tasks.",
            most(nystrom),
            f"{said('nystrom')}.",
        ),
    ]


def _known(values: Sequence[float]) -> Known:
    """What is known of a mean over seeds."""
    if len(values) < 2:
        return Known(-math.inf, math.inf)
    mean, error = fmean(values), 2 * stdev(values) / math.sqrt(len(values))
    return Known(mean - error, mean + error)


def _figures(rows: Sequence[Row], folder: Path) -> "Mapping[str, Figure]":
    ratios = _ratios(rows)
    columns = min(3, 1 + len(ratios))
    figure = figure_of(PAGE, 0.6 + 2.2 * -(-(1 + len(ratios)) // columns))
    grid = figure.subplots(-(-(1 + len(ratios)) // columns), columns, squeeze=False).ravel()
    for place, method in enumerate(METHODS[1:]):
        look, offset = method_look(method), 0.16 * (place - 1.5)
        xs = [i + offset for i in range(len(ratios))]
        means = [fmean(each[method]) for each in ratios.values()]
        ends = [[abs(end(each[method]) - mean) for each, mean in zip(ratios.values(), means, strict=True)]
                for end in (min, max)]  # fmt: skip
        grid[0].errorbar(xs, means, ends, fmt=look.marker, color=look.colour, elinewidth=1.2, label=method)
        if method in SKYFORMER_APPENDIX_F:
            printed = [SKYFORMER_APPENDIX_F[method][task] for task in ratios]
            grid[0].plot(xs, printed, "_", color="black", markersize=9, label="printed" if place == 2 else None)
    grid[0].set_xticks(range(len(ratios)), list(ratios), rotation=0 if len(ratios) < 3 else 30)
    grid[0].set_xlim(-0.5, len(ratios) - 0.5)
    grid[0].set_title("mean of 20 steps")
    for axes, task in zip(grid[1:], ratios, strict=False):
        seeds = sorted({row.seed or 0 for row in rows if _task(row) == task})
        arrays = [np.load(_file(folder, task, seed)) for seed in seeds]
        for method in METHODS[1:]:
            look = method_look(method)
            values = np.stack([array[method] / array["softmax"] for array in arrays])
            steps = np.arange(1, values.shape[1] + 1)
            axes.plot(steps, values.mean(axis=0), color=look.colour, linestyle=look.line)
            axes.fill_between(steps, values.min(axis=0), values.max(axis=0), color=look.colour, alpha=0.15, linewidth=0)
        axes.set_title(task)
        axes.set_xlabel("step i")
    for axes in grid:
        axes.axhline(1, color=REFERENCE, linestyle="--", linewidth=1)
        axes.grid(True, axis="y")
    for axes in grid[1 + len(ratios) :]:
        axes.set_visible(False)
    grid[0].set_ylabel("score over self-attention's")
    figure.legend(
        *grid[0].get_legend_handles_labels(), loc="outside lower center", ncols=5,
        title="markers and lines: means; bars and bands: range of the seeds", title_fontsize=7.5,
    )  # fmt: skip
    return {"": figure}


STUDIES = {
    "skyformer-appendix-f": Study(
        shows="instability of training, relative to softmax attention",
        source="Skyformer, arXiv:2111.00035, section 4.1, and Appendix F in NeurIPS' file of appendices",
        paper_needs="--data with text, retrieval and image",
        minutes=3,
        trains=True,
        plan=_plan,
        tables=_tables,
        verdicts=_verdicts,
        figures=_figures,
    )
}
