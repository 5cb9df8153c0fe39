"""The tasks of GLUE and IMDB: their columns, classes, metrics and files of predictions, as one literal table.

Columns are those of GLUE's own tsv files, then those of other releases (Hugging Face datasets, the original data sets).
In files a class is given by its index, its name, or another spelling in `spellings`. The numbers of MNLI are those of
Hugging Face: 0 entailment, 1 neutral, 2 contradiction.

The first metric selects the best model. For STS-B it is the mean of both correlations.

Source: Wang et al. (2019), arXiv:1804.07461; Maas et al. (2011) for IMDB.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from nystrom.checks import check_names

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
class LabelledTask:
    """The facts of a task.

    Attributes:
        texts: Names of the column of the texts, or of the first of each pair.
        pairs: Names of the column of the second text of each pair; None for single texts.
        labels: Names of the column of the labels.
        classes: Names of the classes, in order; None if the labels are numbers.
        metrics: Its metrics; the first selects the best model.
        spellings: Other words for a class in files.
        submission: File name of GLUE predictions by split, "test" or "test_mismatched"; empty if there is none.
        submitted: Names of the classes in a file of predictions; None for numbers with three decimals.
        bounds: Smallest and largest number, for GLUE's file; None if the labels are classes.
        headless: Columns of the task's tsv files that have no header; empty if all have one.
        broken_rows: Whether its published files hold rows that lack fields; these are left out and counted.
    """

    texts: tuple[str, ...]
    pairs: tuple[str, ...] | None = None
    labels: tuple[str, ...] = ("label",)
    classes: tuple[str, ...] | None
    metrics: tuple[Metric, ...] = ("accuracy",)
    spellings: Mapping[str, str] = field(default_factory=dict)
    submission: Mapping[str, str] = field(default_factory=dict)
    submitted: tuple[str, ...] | None = None
    bounds: tuple[float, float] | None = None
    headless: tuple[str, ...] = ()
    broken_rows: bool = False

    def with_fields(
        self, *, text_field: str | None = None, label_field: str | None = None, pair_field: str | None = None
    ) -> "LabelledTask":
        """The same task with other column names; None for the usual ones. Single texts have no second (ValueError)."""
        if pair_field is not None and self.pairs is None:
            raise ValueError(f"pair_field is {pair_field!r}, but the task is on single texts: leave it out.")
        return replace(
            self,
            texts=self.texts if text_field is None else (text_field,),
            pairs=self.pairs if pair_field is None else (pair_field,),
            labels=self.labels if label_field is None else (label_field,),
        )


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
        labels=("gold_label", "label"),
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


# Columns that are looked for in a user's own files, where none is named.
OWN_TEXTS = ("text", "sentence", "review", "Source")
OWN_FIRST = (*OWN_TEXTS, "text1", "sentence1", "question1", "premise", "question")
NUMBER_METRICS: tuple[Metric, ...] = (
    "correlation",
    "Pearson correlation",
    "Spearman correlation",
    "root mean squared error",
)
OWN_LABELS = ("label", "class", "Target", "sentiment", "score")


def own_task(
    *,
    text_field: str | None = None,
    label_field: str | None = None,
    pair_field: str | None = None,
) -> LabelledTask:
    """The task of a user's own texts, or of pairs if `pair_field` names their second; None for the usual columns."""
    return LabelledTask(
        texts=(OWN_TEXTS if pair_field is None else OWN_FIRST) if text_field is None else (text_field,),
        pairs=None if pair_field is None else (pair_field,),
        labels=OWN_LABELS if label_field is None else (label_field,),
        classes=None,
        metrics=("accuracy", "macro F1"),
    )


def find_labelled(name: str) -> LabelledTask:
    """Look up a task, or raise ValueError."""
    check_names("task", [name], TASKS)
    return TASKS[name]
