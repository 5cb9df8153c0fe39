"""What each part lifts on Text and ListOps, at equal steps, and what attention adds to all of them.

Each arm is a run of `nystrom train`, in the folder arena-small or arena-paper beside those of the studies, with the
preset modern-small: two layers of width 128, the same data, batches, steps and training, plain feed-forward blocks, and
a head with dropout, which the papers' code has not (`nystrom.models.design`). The arms stand on each other: the model
of the papers (Nyström attention with 32 landmarks, a learned table of positions, mean pooling, a convolution of the
values with 35 taps, which stays in all arms); a norm of the pooled tokens over the batch
(`nystrom.models.heads.pooled_norm`); rotary positions in place of the table; short convolutions of queries, keys and
values, with the preset's 3 taps on ListOps and 13 on Text; denoising on Text, shuffled arguments on ListOps; near_far
in place of Nyström attention. With all of it, and only the attention another: exact attention, a window of 33 tokens,
and none, so that the convolutions alone join tokens.

A seed of all arms is trained before the next seed, and tables, figures and verdicts are those of the runs that are
there. "small" has steps for about ten minutes a run of ListOps on one slow core, the mean over the arms, evaluations
included, and for a quarter of an hour of Text; "paper" has the preset's.

Rules, on the test accuracy. The standard error of an arm's mean over s seeds of N samples is the larger of
sqrt(p (1 - p) / N) and, from three seeds on, that of the seeds, deviation / sqrt(s); that of a difference is the root
of the sum of both squared. An arm is above or below another by more than two of these, otherwise they are equal.

- A part lifts the accuracy, if the arm with it is above the one before it on a task and below it on none; it does not
  where it is below on one; the rows cannot tell where both are equal on all tasks, or were not trained on one. Where
  neither is above the best guess without a model, the largest class or what the first operator of an expression tells,
  they are said to be at it, and count as equal.
- An attention adds to convolutions by the same rule, beside the arm with all of it and none; and what a window does not
  see adds by the same rule, of exact attention beside the window.

Source: ours; what lifts attention on these tasks is from Ma et al. (2022), arXiv:2209.10655, arXiv:2501.14850, and
Amos et al. (2023), arXiv:2310.02980, who ask what of it is the attention.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from nystrom_lab.data.store.header import HEADER
from nystrom_lab.measure.rows import Row, read_rows
from nystrom_lab.studies.arena.ablation_report import GUESSES, figures, tables, verdicts
from nystrom_lab.studies.reproduce.study import Part, Plan, Setting, Study, beside_none
from nystrom_lab.studies.training.runs import Training, train
from nystrom_lab.training.data.tasks import find_task, prepare_if_missing
from nystrom_lab.training.presets.published import find_preset

SEEDS = (0, 1, 2)
PRESET = "modern-small"
# On one core of an Intel Xeon a step took 0.49 s on ListOps and, with convolutions of 3 taps, 0.91 s on Text, the mean
# over the arms.
STEPS: dict[str, dict[str, int]] = {
    "listops": {"steps": 1200, "evaluate_every": 300},
    "text": {"steps": 1000, "evaluate_every": 250},
}
_LIFTS: dict[str, dict[str, Any]] = {"listops": {"augment": True}, "text": {"denoise": 1.0}}
_READ = ("test accuracy", *GUESSES, "training time", "peak memory")
_LEFT_OUT = "1,200 of the preset's 5,000 steps on ListOps and 1,000 of 5,000 on Text"


class Arm(NamedTuple):
    """A model of the study.

    Attributes:
        attention: The method.
        options: Its options.
        model: What its model has not of all the parts, as arguments of `nystrom_lab.training.train.train`.
        lifted: Whether its inputs are corrupted or its arguments shuffled.
    """

    attention: str
    options: Mapping[str, object] = {}
    model: Mapping[str, object] = {}
    lifted: bool = True


_NYSTROM: Mapping[str, object] = {"num_landmarks": 32}
_TABLE: Mapping[str, object] = {"positions": "learned", "short_conv_kernel_size": 0}
# A block of queries sees 48 tokens near it and 16 heavy keys exactly.
_NEAR_FAR: Mapping[str, object] = {"block_size": 32, "reach": 8, "num_heavy": 16, "num_clusters": 32, "exact_up_to": 0}
ARMS: dict[str, Arm] = {
    "papers": Arm("nystrom", _NYSTROM, {**_TABLE, "pooled_norm": "none"}, lifted=False),
    "normed": Arm("nystrom", _NYSTROM, _TABLE, lifted=False),
    "rotary": Arm("nystrom", _NYSTROM, {"short_conv_kernel_size": 0}, lifted=False),
    "convolution": Arm("nystrom", _NYSTROM, lifted=False),
    "lifted": Arm("nystrom", _NYSTROM),
    "near_far": Arm("near_far", _NEAR_FAR),
    "softmax": Arm("softmax"),
    "window": Arm("longformer", {"window": 33}),
    "none": Arm("none"),
}


def _plan(setting: Setting) -> Plan:
    text = None if setting.data is None else setting.data / "text"
    if text is None or not (text / HEADER).is_file():
        raise ValueError(
            "this study trains on DATA/text, reviews of up to 1,000 bytes: make it with nystrom data prepare text "
            "--from FILES --max-length 1000 --val-share 0.04 --test-share 0.16 --to DATA/text, and pass --data DATA."
        )
    longest, positions = _longest(text), find_preset("text", PRESET).data.max_length
    if longest > positions:
        raise ValueError(
            f"--data {text} holds a text of {longest} bytes; expected at most {positions}: prepare it with "
            f"--max-length {positions}."
        )
    trainings = {
        (task, arm, seed): Training(f"{task}-{arm}-seed{seed}", "train", _arguments(setting, task, arm, seed))
        for seed in SEEDS
        for arm in ARMS
        for task in STEPS
    }
    parts = [
        Part(training.name, partial(_measure, training, task, arm, setting))
        for (task, arm, _), training in trainings.items()
    ]
    splits = ", ".join(str(len(find_task("text").open(text, split))) for split in ("train", "val", "test"))
    said = {
        "text": f"{splits} texts",
        "listops": "drawn" if _listops(setting) is None else "those of --data",
        "arms": " ".join(ARMS),
        "seeds": " ".join(map(str, SEEDS)),
        "preset": PRESET,
        "steps": ", ".join(f"{task} {trainings[task, 'none', 0].arguments.get('steps')}" for task in STEPS),
        "precision": setting.precision,
    }
    return Plan(parts, said, beside_none(setting, _LEFT_OUT))


def _longest(folder: Path) -> int:
    return max(int(find_task("text").open(folder, split).lengths.max(initial=0)) for split in ("train", "val", "test"))


def _listops(setting: Setting) -> Path | None:
    """ListOps of the data; None where it is drawn."""
    folder = None if setting.data is None else setting.data / "listops"
    return folder if folder is not None and (folder / HEADER).is_file() else None


def _arguments(setting: Setting, task: str, name: str, seed: int) -> dict[str, Any]:
    """Arguments of `nystrom_lab.training.train.train`, but for the data of ListOps."""
    arm = ARMS[name]
    base = find_preset(task, PRESET)
    extent = STEPS[task] if setting.size == "small" else {"steps": base.steps, "evaluate_every": base.evaluate_every}
    precision = {"precision": setting.precision} if setting.size == "small" else {}
    return {
        "task": task,
        "attention": arm.attention,
        "options": dict(arm.options),
        "preset": PRESET,
        "feed_forward": "plain",
        "pooling": "mean",
        "conv_kernel_size": 35,
        **arm.model,
        **(_LIFTS[task] if arm.lifted else {}),
        **extent,
        **precision,
        "seed": seed,
    }


def _measure(training: Training, task: str, arm: str, setting: Setting, folder: Path) -> Iterable[Row]:
    """The results of a run, which is trained or gone on with; missing expressions are drawn first."""
    runs = folder.parent / f"arena-{setting.size}"
    if task == "text":
        assert setting.data is not None, "checked before"
        data = setting.data / "text"
    else:
        data = _listops(setting) or runs / "data-listops"
        prepare_if_missing(task, data, find_preset(task, PRESET).data)
    run = train(training._replace(arguments={**training.arguments, "data": str(data)}), runs)
    for row in read_rows(run.rows):
        if row.quantity in _READ:
            yield replace(row, method=arm).with_facts(task=task)


STUDIES = {"arena-ablation": Study(plan=_plan, tables=tables, verdicts=verdicts, figures=figures)}
