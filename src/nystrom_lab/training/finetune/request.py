"""What a user asks of a fine-tuning, in plain values: a job of a cluster is given the same and reads the rest anew."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from nystrom_lab.data.language.labelled.glue import NUMBER_METRICS, LabelledTask, find_labelled, own_task
from nystrom_lab.data.language.labelled.splits import LabelKind, LabelledData, read_labelled
from nystrom_lab.training.finetune.finetune_settings import Choices, SearchGrid

OWN = "own"


@dataclass(frozen=True)
class Texts:
    """The texts of a fine-tuning; see `nystrom_lab.training.finetune.finetune.finetune`.

    Attributes:
        task: The task; None for texts of the user's own.
        data: A folder, or files.
        text_field: Column of the texts, of the first of each pair.
        label_field: Column of the labels.
        pair_field: Column of the second text of each pair.
        labels: Whether own labels are classes or numbers.
        val_share: Share of the training texts that becomes validation.
    """

    task: str | None
    data: tuple[Path, ...]
    text_field: str | None
    label_field: str | None
    pair_field: str | None
    labels: LabelKind
    val_share: float | None

    def __post_init__(self):
        self.chosen_task()

    @property
    def name(self) -> str:
        """The task's name."""
        return self.task or OWN

    def fields(self) -> dict[str, str | None]:
        """The columns."""
        return {"text_field": self.text_field, "label_field": self.label_field, "pair_field": self.pair_field}

    def chosen_task(self) -> LabelledTask:
        """The task, with these columns.

        Raises:
            ValueError: An unknown task, or columns or labels that it does not leave open.
        """
        if self.task is None:
            return own_task(**self.fields())
        task = find_labelled(self.task).with_fields(**self.fields())
        if self.labels != "auto":
            raise ValueError(f"labels is {self.labels!r}, but {self.task} says what its labels are: leave it out.")
        return task


@dataclass(frozen=True)
class Material:
    """The texts that were read, and where they are from.

    Attributes:
        name: The task's name.
        task: The task.
        data: The texts.
        folder: Where they are from.
        words: The command of the run, behind `nystrom`.
    """

    name: str
    task: LabelledTask
    data: LabelledData
    folder: str
    words: tuple[str, ...]


@dataclass(frozen=True)
class Request:
    """A fine-tuning, or a search of the best one.

    Attributes:
        texts: The texts.
        choices: What is chosen of a run.
        model: The model to start from.
        attention: Method in place of its own.
        options: Options of the method.
        folder: Of the run, or of the search.
        threads: Threads on the CPU; None for torch's choice.
        grid: Values to try; None for one run.
        words: The command, behind `nystrom`.
    """

    texts: Texts
    choices: Choices
    model: str
    attention: str | None
    options: Mapping[str, object] | None
    folder: Path
    threads: int | None
    grid: SearchGrid | None
    words: tuple[str, ...]

    def read(self) -> Material:
        """Read the texts.

        Raises:
            ValueError: Texts or labels that are broken or missing.
        """
        texts, task = self.texts, self.texts.chosen_task()
        found = read_labelled(texts.data, task, own=texts.task is None, kind=texts.labels, val_share=texts.val_share)
        if texts.task is None and found.classes is None:
            task = replace(task, metrics=NUMBER_METRICS)
        return Material(texts.name, task, found, ", ".join(str(path.resolve()) for path in texts.data), self.words)
