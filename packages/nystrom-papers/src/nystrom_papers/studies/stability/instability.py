r"""The experiment of Skyformer's Appendix F: how far the output moves when a training step moves the weights.

With the weights $W_0$ at the start and $W_i$ after step i, the instability score of step i = 1 ... 20 is
$$\tau_i = \frac{\|f(x_i, W_i) - f(x_i, W_{i-1})\|_F^2}{\|W_i - W_{i-1}\|_F^2},$$
where $x_i$ is the batch of the step and f the embedding after two layers: the last hidden states of the real tokens,
without dropout. The norm of the weights is over all weights that f depends on. The score of a method is divided by that
of self-attention in the same step, with the same initial weights and batches, and the 20 ratios are averaged. A ratio
below 1 means that the method is more stable than self-attention.

The learning rate follows torch's OneCycleLR, as in the authors' code: it is about a 25th of its peak in these steps.

Source: Chen et al. (2021), arXiv:2111.00035, section 4.1, and its Appendix F, in the file that NeurIPS publishes beside
the paper.
Beside the paper's methods there is near_far with its defaults; no claim rests on it.
Departs from the paper: float32 instead of mixed precision, no dropout of attention weights, and landmarks drawn one
from each segment instead of independently.
"""

import math
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor, nn

from nystrom.whole_files import whole_bytes
from nystrom_lab.data.lra.facts import LRA
from nystrom_lab.measure.rows import Row
from nystrom_lab.training.presets import DRAWN_BY_SEGMENTS, DataSizes, find_preset
from nystrom_lab.training.tasks import Model
from nystrom_papers.bench.training_step import TrainingStep
from nystrom_papers.report.printed import SKYFORMER_APPENDIX_F
from nystrom_papers.studies.reproduce.declared import Answer, Cells, Claim, Lines, Pivot, declare, each, frame_of
from nystrom_papers.studies.reproduce.known import holds_for_share, mean_over
from nystrom_papers.studies.reproduce.spread import spread_row
from nystrom_papers.studies.reproduce.study import Figures, Part, Plan, Setting, in_words
from nystrom_papers.studies.stability.arena import PRESET, ArenaTask, Batch, find_sources, new_model, random_batches

STEPS = 20
METHODS = ("softmax", "nystrom", "kernelized", "skyformer", "near_far")
_SCORE, _RATIO = "instability score", "ratio to self-attention"
# The small size divides the paper's batch by this.
_PART = 16


def _plan(setting: Setting) -> Plan:
    paper = setting.size == "paper"
    batches = {task: find_preset(task, PRESET).batch_size // (1 if paper else _PART) for task in LRA}
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
    said = in_words(
        tasks=", ".join(source.name for source in sources), methods=METHODS,
        batches=[batches[source.task] for source in sources], seeds=len(seeds), steps=STEPS,
    )  # fmt: skip
    differs = ["float32 instead of mixed precision", DRAWN_BY_SEGMENTS]
    if not paper:
        differs.append(f"a {_PART}th of the paper's batches")
    if missing:
        differs.append(f"without {', '.join(missing)}, which are not drawn")
    return Plan(parts, said, "; ".join(differs))


def _drawn(task: str, batch: int) -> DataSizes:
    data = find_preset(task, PRESET).data
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

    The settings are the paper's for the task; the seed is that of dropout and of the method's draws.
    """
    preset, scores = find_preset(task, PRESET), []
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=preset.learning_rate, betas=preset.adam_betas, eps=preset.adam_epsilon,
        weight_decay=preset.weight_decay,
    )  # fmt: skip
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=preset.learning_rate, pct_start=preset.warmup_steps / preset.steps,
        anneal_strategy="linear", total_steps=preset.steps,
    )  # fmt: skip
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


def _framed(rows: Sequence[Row]) -> pd.DataFrame:
    """The rows, and the ratio that the paper prints."""
    frame = frame_of(rows)
    printed = [SKYFORMER_APPENDIX_F.get(row.method, {}).get(row.task) for row in each(frame)]
    return frame.assign(printed=["–" if ratio is None else f"{ratio:.2f}" for ratio in printed])


def _lies(names: tuple[str, ...], least: float, limit: float, rows: pd.DataFrame) -> Answer:
    """The mean over the seeds lies between two limits in every task; one seed decides nothing."""
    answers, said = [], []
    for name in names:
        of_tasks: dict[str, list[float]] = {}
        for row in each(rows, _RATIO, method=name):
            of_tasks.setdefault(row.task, []).append(row.value)
        means = {task: (fmean(values), mean_over(values)) for task, values in of_tasks.items()}
        answers += [known.within(least, limit) for _, known in means.values()]
        shown = (f"{mean:.2f}, {low:.2f} to {high:.2f} ({task})" for task, (mean, (low, high)) in means.items())
        said.append(f"{name} {', '.join(shown)}")
    return holds_for_share(answers), f"{'; '.join(said)}."


def _by_step(rows: pd.DataFrame, folder: Path) -> Figures:
    """The ratio of each step, the mean over the seeds and its range."""
    points = []
    for task in rows["task"].unique():
        seeds = sorted({row.seed or 0 for row in each(rows, _RATIO, task=task)})
        arrays = [np.load(_file(folder, task, seed)) for seed in seeds]
        for method in METHODS[1:]:
            ratios = np.stack([array[method] / array["softmax"] for array in arrays])
            ends = zip(ratios.mean(axis=0), ratios.min(axis=0), ratios.max(axis=0), strict=True)
            points += [
                {"quantity": _RATIO, "method": method, "task": task, "n": 0, "step": step}
                | dict(zip(_ENDS, of, strict=True))
                for step, of in enumerate(ends, start=1)
            ]
    figure = _STEPS.draw(pd.DataFrame(points))
    return {} if figure is None else {"": figure}


_ENDS = ("value", "low", "high")
_STEPS = Lines(
    of={"quantity": _RATIO}, over="step", panel="{task}", x_label="step i", y_label="score over self-attention's",
    band="range of the seeds", levels=(1.0,), options={"log_x": False, "log_y": False},
)  # fmt: skip


STUDIES = {
    "skyformer-appendix-f": declare(
        shows="instability of training, relative to softmax attention",
        source="Skyformer, arXiv:2111.00035, section 4.1, and Appendix F in NeurIPS' file of appendices",
        paper_needs="--data with text, retrieval and image",
        minutes=3,
        trains=True,
        plan=_plan,
        framed=_framed,
        tables=[
            Pivot(
                title="mean ratio of the instability score to self-attention's, here / printed",
                index={"method": "{method}"}, names={"method": METHODS[1:]},
                columns=[Cells("{task}", _RATIO, "{value:.2f} / {printed}", pick=fmean)],
            )
        ],
        claims=[
            Claim(
                "Kernelized attention and Skyformer have a lower instability score than self-attention in every task.",
                partial(_lies, ("kernelized", "skyformer"), -math.inf, 1.0), "Skyformer, section 4.1",
            ),
            Claim(
                "Nyströmformer's fluctuates around 1 in all the tasks.", partial(_lies, ("nystrom",), 0.9, 1.1),
                "Skyformer, section 4.1",
            ),
        ],
        figures=_by_step,
    )
}  # fmt: skip
