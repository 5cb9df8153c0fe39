"""Table 2 of Nyströmformer and Table 1 of its supplement: fine-tuning compared with exact attention.

A pretrained encoder is fine-tuned on each task of DATA (DATA/sst2, DATA/mrpc ...), with exact attention and with each
other method in its place. Each training is a run of `nystrom finetune`; the runs are in the folder finetuning-small or
finetuning-paper, beside the folders of the studies.

- The score of a task is its first metric: F1 for MRPC and QQP, accuracy elsewhere. It is taken on the test texts, or on
  the validation texts where the test labels are not published.
- A folder that holds dev rows alone is split here. This is not the published split: its rows say splits=own.
- Nyström attention differs from exact attention only on texts with more tokens than landmarks. The table has the share
  of such texts. If it is 0, the scores are those of exact attention by construction, and the small size does not
  measure them again.
- Where DATA/mnli also has the mismatched texts, the same models are scored on them, in separate lines. No claim rests
  on these.
- At the small size, short and long texts of IMDB are also scored separately, which shows where a gap to exact attention
  comes from; and some models that were trained with exact attention are scored with other methods in its place.

Standard errors:

- That of an accuracy over N texts is the error of a share; that of F1 is the error of its counts, to first order.
- With several seeds, the standard error of their mean is added in quadrature. N does not grow with the seeds, since
  their texts are the same.
- That of a difference is as if the two were scored on different texts. Both are right on much the same texts, so the
  true error is smaller.

Source: Xiong et al. (2021), arXiv:2102.03902, Table 2; its supplement, Table 1.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from nystrom.attention.method_names import read_method
from nystrom.command_options import ConvertOptions
from nystrom.integrations.convert import convert
from nystrom.models.files.model_fingerprint import model_fingerprint
from nystrom_lab.data.language.labelled.glue import find_labelled
from nystrom_lab.data.language.labelled.splits import read_labelled
from nystrom_lab.data.language.tokenizer import load_tokenizer
from nystrom_lab.measure.rows import Row, read_rows
from nystrom_lab.training.finetune.encoding import EncodedSplit
from nystrom_papers.studies.reproduce.encoders import find_folder, instead_of_bert_base
from nystrom_papers.studies.reproduce.study import Part, Plan, Setting, part
from nystrom_papers.studies.training.by_length import rows_by_length
from nystrom_papers.studies.training.finetuned_report import EXACT, LONG, SHARE, declare_1, declare_2
from nystrom_papers.studies.training.runs import Training, train
from nystrom_papers.studies.training.swapped import swapped_rows

_TASKS = ("sst2", "mrpc", "qnli", "qqp", "mnli", "imdb")
_LANDMARKS = (16, 32, 64)


class Case(NamedTuple):
    """The fine-tunings of one task.

    Attributes:
        methods: Methods, by their names with sizes.
        extent: How long to train, as arguments of `nystrom_lab.training.finetune.finetune.finetune`.
        seeds: One run for each.
        swapped: Methods with which the model that was trained with exact attention is scored, without training.
        by_length: Whether short and long texts are also scored separately.
    """

    methods: Sequence[str]
    extent: Mapping[str, object] = {}
    seeds: Sequence[int] = (0,)
    swapped: Sequence[str] = ()
    by_length: bool = False


_STEPS = {"steps": 200, "evaluate_every": 100}
SMALL: dict[str, Case] = {
    "sst2": Case(
        (EXACT, "nystrom-32", "nystrom-16", "near_far"),
        {"steps": 1000, "evaluate_every": 500},
        swapped=("nystrom-32", "nystrom-16", "near_far"),
    ),
    "mrpc": Case(
        (EXACT, "nystrom-64", "nystrom-32", "nystrom-16", "near_far"),
        seeds=(0, 1, 2),
        swapped=("nystrom-64", "nystrom-32", "nystrom-16", "near_far"),
    ),
    "qnli": Case((EXACT, "nystrom-64", "nystrom-32"), {"epochs": 2}),
    "qqp": Case((EXACT, "nystrom-32", "nystrom-16"), {"epochs": 2}),
    "mnli": Case((EXACT, "nystrom-64", "nystrom-32"), {"epochs": 2}),
    "imdb": Case(
        (EXACT, "nystrom-64", "nystrom-32", "near_far"),
        _STEPS,
        swapped=("nystrom-64", "nystrom-32", "near_far"),
        by_length=True,
    ),
}
SMALL_LONG: dict[str, Case] = {"imdb": Case((EXACT, "nystrom-64"), _STEPS)}
PAPER: dict[str, Case] = dict.fromkeys(_TASKS, Case((EXACT, "nystrom-64")))
_SMALL_DIFFERS = (
    "all-MiniLM-L6-v2 instead of BERT-base, its attention replaced without pretraining; fewer steps, on splits of our "
    "own; MRPC as in the paper"
)

_PAPER_DIFFERS = (
    "Nyström attention without a convolution in place of the exact one in the same model, instead of a model that was "
    "pretrained with it"
)
_LONG_DIFFERS = (
    "1,024 tokens by repeating the table of positions, instead of 40,000 steps of pretraining at that length; both "
    "lengths with both attentions"
)


def _table_2(setting: Setting) -> Plan:
    cases = _present(setting, SMALL if setting.size == "small" else PAPER)
    model = _model(setting)
    trainings = _trainings(setting, cases, str(model))
    searched = () if "mrpc" not in cases else ("nystrom-32",) if setting.size == "small" else (EXACT, "nystrom-64")
    for method in searched:
        words = _arguments(setting, "mrpc", method, str(model)) | {"search": True, "seed": 0}
        trainings.append(("mrpc", method, Training(f"mrpc-search-{method}", "finetune", words)))
    parts = [
        part("lengths", _measure_lengths, setting, tuple(cases), model),
        *(Part(training.name, partial(_measure, *rest, training, setting)) for *rest, training in trainings),
        *(
            Part(f"{task}-swapped", partial(_measure_swapped, setting, task, case, model, trainings))
            for task, case in cases.items()
            if case.swapped
        ),
        *(
            Part(f"{task}-by-length", partial(_measure_by_length, setting, task, model, trainings))
            for task, case in cases.items()
            if case.by_length
        ),
    ]
    differs = _SMALL_DIFFERS if setting.size == "small" else _paper_differs(model)
    return Plan(parts, _said(model, cases, search=" ".join(searched)), differs)


def _table_1(setting: Setting) -> Plan:
    """The tasks at 512 tokens and, with more positions, at 1,024."""
    cases = _present(setting, SMALL_LONG if setting.size == "small" else PAPER)
    model = _model(setting)
    trainings = _trainings(setting, cases, str(model))
    trainings += _trainings(setting, cases, f"{model.name}-{LONG}", f"-{LONG}", {"max_length": LONG})
    parts = [Part(training.name, partial(_measure, *rest, training, setting)) for *rest, training in trainings]
    differs = (
        "IMDB alone, since the other texts are far shorter; all-MiniLM-L6-v2 with repeated positions instead of a "
        "pretraining on 1,024 tokens; 200 steps"
    )
    if setting.size == "paper":
        differs = f"{_paper_differs(model)}; {_LONG_DIFFERS}"
    return Plan(parts, _said(model, cases, lengths=f"512 {LONG}"), differs)


def _model(setting: Setting) -> Path:
    """The folder of the model that is fine-tuned.

    Raises:
        ValueError: The cases of `find_folder`, or the paper's size without a model.
    """
    if setting.size == "paper" and setting.model is None:
        raise ValueError("--size paper fine-tunes a trained BERT-base: name its folder with --model.")
    model, _ = find_folder(setting.model)
    return model


def _paper_differs(model: Path) -> str:
    return "; ".join(filter(None, [instead_of_bert_base(model), _PAPER_DIFFERS]))


def _present(setting: Setting, cases: Mapping[str, Case]) -> dict[str, Case]:
    """The tasks whose data are present.

    Raises:
        ValueError: No task is present, or not all are at the paper's size.
    """
    wanted = ", ".join(cases)
    if setting.data is None:
        raise ValueError(f"this study fine-tunes on {wanted}: name the folder that holds their data with --data.")
    present = {task: case for task, case in cases.items() if (setting.data / task).is_dir()}
    if not present or (setting.size == "paper" and len(present) < len(cases)):
        missing = ", ".join(task for task in cases if task not in present)
        raise ValueError(f"--data {setting.data} holds no folder of {missing}: put the files of each task into one.")
    return present


def _arguments(setting: Setting, task: str, method: str, model: str) -> dict[str, object]:
    assert setting.data is not None, "checked before"
    attention, options = read_method(method)
    words: dict[str, object] = {"task": task, "data": [str(setting.data / task)], "model": model}
    precision = {"precision": setting.precision} if setting.size == "small" else {}
    return words | {"attention": attention, "options": options} | precision


def _trainings(
    setting: Setting, cases: Mapping[str, Case], model: str, ending: str = "", more: Mapping[str, object] = {}
) -> list[tuple[str, str, Training]]:
    """Task, method and training of every run of these cases."""
    return [
        (
            task,
            method,
            Training(
                f"{task}{ending}-{method}-seed{seed}",
                "finetune",
                {**_arguments(setting, task, method, model), **case.extent, **more, "seed": seed},
            ),
        )
        for task, case in cases.items()
        for seed in case.seeds
        for method in case.methods
    ]


def _said(model: Path, cases: Mapping[str, Case], **more: str) -> dict[str, str]:
    """The setting in a few words; each run is checked against its own."""
    said = {"model": model.name, "fingerprint": model_fingerprint(model)}
    for task, case in cases.items():
        extent = " ".join(f"{name}={value}" for name, value in case.extent.items())
        seeds = f"seeds {' '.join(map(str, case.seeds))}"
        said[task] = ", ".join(filter(None, (" ".join(case.methods), extent, seeds)))
    return said | more


def _measure(task: str, method: str, training: Training, setting: Setting, folder: Path) -> Iterable[Row]:
    """The rows of a run; the model with more positions is made first."""
    runs = folder.parent / f"finetuning-{setting.size}"
    arguments = {**training.arguments, "model": _made(setting, str(training.arguments["model"]), runs)}
    run = train(training._replace(arguments=arguments), runs)
    kind = "search" if arguments.get("search") else "run"
    for row in read_rows(run.rows):
        yield replace(row, method=method).with_facts(task=task, kind=kind)


def _made(setting: Setting, name: str, runs: Path) -> str:
    """The folder of a model; the one with more positions is made from the given one where it is missing."""
    model, _ = find_folder(setting.model)
    if name != f"{model.name}-{LONG}":
        return name
    made = runs / name
    if not (made / "config.json").is_file():
        convert(
            ConvertOptions(
                model, made, num_landmarks=64, conv_kernel_size=None, max_position_embeddings=LONG, stretch="repeat"
            )
        )
    return str(made)


def _measure_lengths(setting: Setting, tasks: Sequence[str], model: Path) -> Iterable[Row]:
    """The share of the scored texts with more tokens than landmarks."""
    assert setting.data is not None, "checked before"
    for task in tasks:
        name, split = _scored(setting.data / task, task, model)
        for m in _LANDMARKS:
            share = split.longer_than(m)
            facts = {"model": model.name, "task": task, "kind": "lengths"}
            yield Row(
                quantity=f"{name} {SHARE}", method="nystrom", value=share, m=m, n=512, facts=facts, repeats=len(split)
            )


def _scored(data: Path, task: str, model: Path) -> tuple[str, EncodedSplit]:
    """The name of the scored split, test or validation, and its texts as tokens."""
    labelled = read_labelled((data,), find_labelled(task), own=False, kind="auto", val_share=None)
    name = "test" if "test" in labelled.splits else "validation"
    return name, EncodedSplit(labelled.splits[name], load_tokenizer(str(model)), max_length=512, segments=False)


def _measure_by_length(
    setting: Setting, task: str, model: Path, trainings: Sequence[tuple[str, str, Training]], folder: Path
) -> Iterable[Row]:
    """The accuracy of seed 0 of each method on short and on long texts."""
    assert setting.data is not None, "checked before"
    name, split = _scored(setting.data / task, task, model)
    for of, method, training in trainings:
        if of == task and training.arguments["seed"] == 0 and "search" not in training.arguments:
            run = train(training, folder.parent / f"finetuning-{setting.size}")
            yield from rows_by_length(
                run.path / "predictions" / f"{name}.tsv", split.lengths, split=name, method=method,
                precision=setting.precision, facts={"model": model.name, "task": task, "kind": "by-length"},
            )  # fmt: skip


def _measure_swapped(
    setting: Setting, task: str, case: Case, model: Path, trainings: Sequence[tuple[str, str, Training]], folder: Path
) -> Iterable[Row]:
    """The scores of the first model trained with exact attention, with other methods in its place."""
    assert setting.data is not None, "checked before"
    exact = next(training for of, method, training in trainings if (of, method) == (task, EXACT))
    run = train(exact, folder.parent / f"finetuning-{setting.size}")
    methods = (EXACT, *case.swapped)
    data, precision = setting.data / task, setting.precision
    for row in swapped_rows(run.best, task, data, methods, name=model.name, precision=precision):
        yield row.with_facts(task=task, kind="swapped")


STUDIES = {
    "nystromformer-table-2": declare_2(
        shows="GLUE and IMDB after fine-tuning",
        source="Nyströmformer, arXiv:2102.03902, Table 2",
        needs="--data with sst2, mrpc ...",
        paper_needs="--model with a trained BERT-base, about 1 hour on an A100, and 75 to pretrain one with Nyström "
        "attention",
        trains=True,
        plan=_table_2,
    ),
    "supplement-table-1": declare_1(
        shows="GLUE after pretraining on 512 and 1,024 tokens",
        source="Nyströmformer, supplement, Table 1",
        needs="--data with imdb",
        paper_needs="--model with a trained BERT-base, about 10 hours on an A100",
        trains=True,
        plan=_table_1,
    ),
}
