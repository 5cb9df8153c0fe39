"""How far each part of a model lifts the accuracy on Text and ListOps at equal steps, and what attention adds to all.

Each arm is a run of `nystrom train` with the preset modern-small, in the folder arena-small or arena-paper beside those
of the studies. All arms have two layers of width 128, the same data, batches, steps and training, plain feed-forward
blocks, a convolution of the values with 35 taps, and a head with dropout, which the papers' code does not have
(`nystrom.models.design`). Each arm adds a part to the one before it:

1. the model of the papers: Nyström attention with 32 landmarks, a learned table of positions, and mean pooling;
2. a norm of the pooled tokens over the batch;
3. rotary positions in place of the table;
4. short convolutions of queries, keys and values, with the preset's 3 taps on ListOps and 13 on Text;
5. denoising on Text, and shuffled arguments on ListOps;
6. near_far in place of Nyström attention.

Three more arms have all the parts and differ only in the attention: exact attention, a window of 33 tokens, and none,
so that only the convolutions join tokens.

All arms are trained with a seed before the next seed begins. Tables, figures and verdicts are those of the runs that
are there. With the size "small", the steps are chosen for about ten minutes a run of ListOps and a quarter of an hour a
run of Text, on one slow core, evaluations included, as a mean over the arms. "paper" has the preset's steps.

The rules are applied to the test accuracy. The standard error of an arm's mean over s seeds of N samples is
sqrt(p (1 - p) / N) or, from three seeds on, that of the seeds, deviation / sqrt(s), if it is larger. That of a
difference is the square root of the sum of their squares. One arm is above or below another if they differ by more than
two of these; otherwise they are equal. If neither arm is above the best guess without a model, both count as equal and
are said to be at the guess. That guess is the largest class, or what the first operator of an expression tells.

Source: ours. What lifts attention on these tasks is from Ma et al. (2022), arXiv:2209.10655, arXiv:2501.14850, and Amos
et al. (2023), arXiv:2310.02980, who ask how much of it is due to attention.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from nystrom_lab.data.store.header import HEADER
from nystrom_lab.measure.rows import Row, read_rows
from nystrom_lab.studies.arena.ablation_report import CLAIMED, GUESSES, figures, tables
from nystrom_lab.studies.reproduce.declared import declare
from nystrom_lab.studies.reproduce.study import Part, Plan, Setting, beside_none
from nystrom_lab.studies.training.runs import Training, train
from nystrom_lab.training.data.tasks import find_task, prepare_if_missing
from nystrom_lab.training.presets import find_preset

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
        model: Which of the parts its model lacks, as arguments of `nystrom_lab.training.train.train`.
        lifted: Whether its training inputs are corrupted (Text) or their arguments shuffled (ListOps).
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
    """The folder of ListOps in --data; None where expressions are generated."""
    folder = None if setting.data is None else setting.data / "listops"
    return folder if folder is not None and (folder / HEADER).is_file() else None


def _arguments(setting: Setting, task: str, name: str, seed: int) -> dict[str, Any]:
    """Arguments of `nystrom_lab.training.train.train`, without the data."""
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
    """The results of a run, which is trained or continued; missing expressions are generated first."""
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


STUDIES = {
    "arena-ablation": declare(
        shows="how far each part of a model lifts accuracy on Text and ListOps, and what attention adds to all",
        source="this library",
        needs="--data with text",
        trains=True,
        plan=_plan,
        tables=[tables],
        claims=CLAIMED,
        figures=figures,
    )
}
