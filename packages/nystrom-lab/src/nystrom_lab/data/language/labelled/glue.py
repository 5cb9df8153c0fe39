"""The tasks of GLUE and IMDB: their columns, classes, metrics and files of predictions, as one literal table.

Columns are those of GLUE's own tsv files, then those of other releases (Hugging Face datasets, the original data sets).
The original files of STS-B, sts-train.csv and so on, have tabs between their fields, no header, and for some rows two
fields more, which name their sources.
In files a class is given by its index, its name, or another spelling in `spellings`. The numbers of MNLI are those of
Hugging Face: 0 entailment, 1 neutral, 2 contradiction.

The first metric selects the best model. For STS-B it is the mean of both correlations.

Source: Wang et al. (2019), arXiv:1804.07461; Maas et al. (2011) for IMDB.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from nystrom.checks import check_names
from nystrom_lab.data.sources.columns import GOLD_LABEL, TextColumns, own_columns

Metric = Literal[
    "accuracy",
    "F1",
    "macro F1",
    "Matthews correlation",
    "correlation",
    "Pearson correlation",
    "Spearman correlation",
    "root mean squared error",
]


@dataclass(frozen=True, kw_only=True)
class LabelledTask(TextColumns):
    """The facts of a task, with its columns.

    Attributes:
        classes: Names of the classes, in order; None if the labels are numbers.
        metrics: Metrics of the task; the first selects the best model.
        spellings: Other words for a class in files.
        submission: File name of GLUE predictions by split, "test" or "test_mismatched"; empty if there is none.
        submitted: Names of the classes in a file of predictions; None for numbers with three decimals.
        bounds: Smallest and largest number, for GLUE's file; None if the labels are classes.
    """

    classes: tuple[str, ...] | None
    metrics: tuple[Metric, ...] = ("accuracy",)
    spellings: Mapping[str, str] = field(default_factory=dict)
    submission: Mapping[str, str] = field(default_factory=dict)
    submitted: tuple[str, ...] | None = None
    bounds: tuple[float, float] | None = None


_FIRST, _SECOND, _PLACES = ("sentence1",), ("sentence2",), ("0", "1", "2")

TASKS: dict[str, LabelledTask] = {
    "cola": LabelledTask(
        texts=("sentence",),
        classes=("unacceptable", "acceptable"),
        metrics=("Matthews correlation", "accuracy"),
        submission={"test": "CoLA.tsv"},
        submitted=_PLACES,
        headless=("source", "label", "mark", "sentence"),
    ),
    "sst2": LabelledTask(
        texts=("sentence",), classes=("negative", "positive"), submission={"test": "SST-2.tsv"}, submitted=_PLACES
    ),
    "mrpc": LabelledTask(
        texts=("#1 String", "sentence1"),
        pairs=("#2 String", "sentence2"),
        labels=("Quality", "label"),
        classes=("not_equivalent", "equivalent"),
        metrics=("F1", "accuracy"),
        submission={"test": "MRPC.tsv"},
        submitted=_PLACES,
    ),
    "stsb": LabelledTask(
        texts=_FIRST,
        pairs=_SECOND,
        labels=("score", "label"),
        classes=None,
        metrics=("correlation", "Pearson correlation", "Spearman correlation"),
        submission={"test": "STS-B.tsv"},
        bounds=(0.0, 5.0),
        headless=("genre", "file", "year", "id", "score", "sentence1", "sentence2"),
        longer_rows=True,
    ),
    "qqp": LabelledTask(
        texts=("question1",),
        pairs=("question2",),
        labels=("is_duplicate", "label"),
        classes=("not_duplicate", "duplicate"),
        metrics=("F1", "accuracy"),
        submission={"test": "QQP.tsv"},
        submitted=_PLACES,
        headless=("is_duplicate", "question1", "question2", "id"),
        broken_rows=True,
    ),
    "mnli": LabelledTask(
        texts=("sentence1", "premise"),
        pairs=("sentence2", "hypothesis"),
        labels=(GOLD_LABEL, "label"),
        classes=("entailment", "neutral", "contradiction"),
        submission={"test": "MNLI-m.tsv", "test_mismatched": "MNLI-mm.tsv"},
        submitted=("entailment", "neutral", "contradiction"),
    ),
    "qnli": LabelledTask(
        texts=("question",),
        pairs=("sentence",),
        classes=("entailment", "not_entailment"),
        submission={"test": "QNLI.tsv"},
        submitted=("entailment", "not_entailment"),
    ),
    "rte": LabelledTask(
        texts=_FIRST,
        pairs=_SECOND,
        classes=("entailment", "not_entailment"),
        submission={"test": "RTE.tsv"},
        submitted=("entailment", "not_entailment"),
    ),
    "wnli": LabelledTask(
        texts=_FIRST,
        pairs=_SECOND,
        classes=("not_entailment", "entailment"),
        submission={"test": "WNLI.tsv"},
        submitted=_PLACES,
    ),
    "imdb": LabelledTask(
        texts=("text", "review", "sentence"),
        labels=("label", "sentiment"),
        classes=("neg", "pos"),
        spellings={"negative": "neg", "positive": "pos"},
    ),
}


NUMBER_METRICS: tuple[Metric, ...] = (
    "correlation",
    "Pearson correlation",
    "Spearman correlation",
    "root mean squared error",
)


def own_task(
    *, text_field: str | None = None, label_field: str | None = None, pair_field: str | None = None
) -> LabelledTask:
    """The task of a user's own texts, or of pairs if `pair_field` names their second; None for the usual columns."""
    columns = own_columns(
        pairs=pair_field is not None, text_field=text_field, label_field=label_field, pair_field=pair_field
    )
    return LabelledTask(**vars(columns), classes=None, metrics=("accuracy", "macro F1"))


def find_labelled(name: str) -> LabelledTask:
    """Look up a task, or raise ValueError."""
    check_names("task", [name], TASKS)
    return TASKS[name]
