"""The labelled texts of a fine-tuning, read and checked before torch is imported."""

from dataclasses import dataclass, replace

from nystrom_lab.config import FinetuneOptions
from nystrom_lab.data.language.labelled.glue import NUMBER_METRICS, LabelledTask, find_labelled, own_task
from nystrom_lab.data.language.labelled.splits import LabelledData, read_labelled

OWN = "own"


@dataclass(frozen=True)
class LabelledInputs:
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


def read_texts(options: FinetuneOptions, words: tuple[str, ...]) -> LabelledInputs:
    """Read the texts of a fine-tuning.

    Raises:
        ValueError: Broken or missing texts or labels.
    """
    task = chosen_task(options)
    data = read_labelled(options.data, task, own=options.task is None, kind=options.labels, val_share=options.val_share)
    if options.task is None and data.classes is None:
        task = replace(task, metrics=NUMBER_METRICS)
    return LabelledInputs(
        options.task or OWN, task, data, ", ".join(str(path.resolve()) for path in options.data), words
    )


def chosen_task(options: FinetuneOptions) -> LabelledTask:
    """The task, with the columns that were given.

    Raises:
        ValueError: An unknown task, or columns or labels that the task already fixes.
    """
    if options.task is None:
        return own_task(**options.columns())
    task = find_labelled(options.task).with_fields(**options.columns())
    if options.labels != "auto":
        raise ValueError(f"labels is {options.labels!r}, but {options.task} has fixed labels: leave it out.")
    return task
