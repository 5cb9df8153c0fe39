"""What a fine-tuning, or a search for the best one, is asked to do, as plain values that a cluster job can receive."""

from dataclasses import dataclass, replace
from pathlib import Path

from nystrom_lab.config import FinetuneOptions, SearchGrid
from nystrom_lab.data.language.labelled.glue import NUMBER_METRICS, LabelledTask, find_labelled, own_task
from nystrom_lab.data.language.labelled.splits import LabelledData, read_labelled

OWN = "own"


@dataclass(frozen=True)
class Material:
    """The loaded texts, and their source.

    Attributes:
        name: The task's name.
        task: The task.
        data: The texts.
        folder: Their source folder.
        words: The command of the run, after `nystrom`.
    """

    name: str
    task: LabelledTask
    data: LabelledData
    folder: str
    words: tuple[str, ...]


@dataclass(frozen=True)
class Request:
    """A fine-tuning, or a search for the best one.

    Attributes:
        asked: The user's options, with device and precision already resolved from "auto".
        folder: Folder of the run, or of the search.
        grid: Values to try; None for one run.
        words: The command, after `nystrom`.
    """

    asked: FinetuneOptions
    folder: Path
    grid: SearchGrid | None
    words: tuple[str, ...]

    def read(self) -> Material:
        """Read the texts.

        Raises:
            ValueError: Broken or missing texts or labels.
        """
        asked, task = self.asked, chosen_task(self.asked)
        found = read_labelled(asked.data, task, own=asked.task is None, kind=asked.labels, val_share=asked.val_share)
        if asked.task is None and found.classes is None:
            task = replace(task, metrics=NUMBER_METRICS)
        return Material(
            asked.task or OWN, task, found, ", ".join(str(path.resolve()) for path in asked.data), self.words
        )


def chosen_task(asked: FinetuneOptions) -> LabelledTask:
    """The task, with the columns that were given.

    Raises:
        ValueError: An unknown task, or columns or labels that the task already fixes.
    """
    if asked.task is None:
        return own_task(**asked.columns())
    task = find_labelled(asked.task).with_fields(**asked.columns())
    if asked.labels != "auto":
        raise ValueError(f"labels is {asked.labels!r}, but {asked.task} has fixed labels: leave it out.")
    return task
