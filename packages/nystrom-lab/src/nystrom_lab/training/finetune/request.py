"""The user's options of a fine-tuning, as plain values that a cluster job can receive."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, fields, replace
from pathlib import Path
from typing import Any

from nystrom_lab.data.language.labelled.glue import NUMBER_METRICS, LabelledTask, find_labelled, own_task
from nystrom_lab.data.language.labelled.splits import LabelKind, LabelledData, read_labelled
from nystrom_lab.training.finetune.finetune_settings import PRESET, SearchGrid, TrainingExtent
from nystrom_lab.training.grid.request import NO_SLURM, Slurm, Where
from nystrom_lab.training.options import RunOptions

OWN = "own"
NO_GRID = SearchGrid()


@dataclass(frozen=True)
class FinetuneOptions(RunOptions):
    """Options of a fine-tuning; the defaults are the paper's.

    Attributes:
        task: cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte, wnli or imdb. Leave it out for your own texts.
        model: Folder of an encoder with its tokenizer, or OWNER/NAME: of this library, a published Nyströmformer, or
            any encoder of transformers.
        data: GLUE's folder of the task; or files named train, dev and test (.tsv, .csv, .jsonl, .parquet, may be
            compressed); or a folder saved by Hugging Face datasets.
        to: Folder of the run. Default: runs/finetune-TASK-MODEL-ATTENTION-seedSEED.
        attention: Attention method; "softmax" is exact attention. Default: the model's own attention.
        options: Options of the method.
        plan: Plan from `nystrom inspect --budget`, with a method for each layer, in place of one method for all.
        text_field: Column of the texts, or of the first text of each pair. Default: the usual names.
        label_field: Column of the labels.
        pair_field: Column of the second text of each pair. Without it, your own data are single texts.
        labels: Whether the labels of your own data are classes or numbers; "auto" means numbers if any is not an
            integer.
        val_share: Share of the training texts to hold out for validation. Default: a tenth if there is no validation
            split.
        epochs: Passes over the training texts. Default: 4, unless steps is given.
        steps: Steps, in place of epochs.
        batch_size: Global batch size: texts per step, over all processes and accumulation steps.
        learning_rate: Peak learning rate, at the end of the warm-up.
        max_length: Truncation length of a text, or of a pair, in tokens. Default: 512, or the model's positions if
            fewer.
        warmup_steps: Steps of linear warm-up. Default: a tenth of all steps.
        evaluate_every: Steps between evaluations, each followed by a checkpoint. Default: once per epoch.
        search: Search batch sizes 8, 16, 32 and learning rates 2e-5, 3e-5, 4e-5, 5e-5, as the paper does for MRPC, and
            evaluate the run that is best on validation.
        grid: Other values to search.
        jobs: Trials of a search that run in parallel on a cluster. Default: all. On this machine they run one at a
            time.
        on: "local", or "slurm": one job per trial of a search, on the cluster of this machine, with one core unless
            threads is given. This process may end before the jobs; the same command waits for them again.
        slurm: Resources of each job.
    """

    task: str | None = None
    _: KW_ONLY
    model: str
    data: tuple[Path, ...]
    to: Path | None = None
    attention: str | None = None
    options: Mapping[str, object] | None = None
    plan: Path | None = None
    text_field: str | None = None
    label_field: str | None = None
    pair_field: str | None = None
    labels: LabelKind = "auto"
    val_share: float | None = None
    epochs: float | None = None
    steps: int | None = None
    batch_size: int = PRESET.batch_size
    learning_rate: float = PRESET.learning_rate
    max_length: int | None = None
    warmup_steps: int | None = None
    evaluate_every: int | None = None
    search: bool = False
    grid: SearchGrid = NO_GRID
    jobs: int | None = None
    on: Where = "local"
    slurm: Slurm = NO_SLURM

    @property
    def extent(self) -> TrainingExtent:
        """How long to train."""
        return TrainingExtent(**{entry.name: getattr(self, entry.name) for entry in fields(TrainingExtent)})

    @property
    def texts(self) -> "Texts":
        """The texts."""
        values: dict[str, Any] = {entry.name: getattr(self, entry.name) for entry in fields(Texts)}
        values["data"] = tuple(self.data)
        return Texts(**values)

    def changed(self, values: Mapping[str, float]) -> "FinetuneOptions":
        """A copy with other values for the names in `SearchGrid`."""
        others: dict[str, Any] = dict(values)
        return replace(self, **({"steps": None} if "epochs" in others else {}), **others)


@dataclass(frozen=True)
class Texts:
    """The texts of a fine-tuning; see `nystrom_lab.training.finetune.finetune.finetune`.

    Attributes:
        task: The task; None for the user's own texts.
        data: A folder, or files.
        text_field: Column of the texts, or of the first text of each pair.
        label_field: Column of the labels.
        pair_field: Column of the second text of each pair.
        labels: Whether own labels are classes or numbers.
        val_share: Share of the training texts to hold out for validation.
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
            ValueError: An unknown task, or columns or labels that the task already fixes.
        """
        if self.task is None:
            return own_task(**self.fields())
        task = find_labelled(self.task).with_fields(**self.fields())
        if self.labels != "auto":
            raise ValueError(f"labels is {self.labels!r}, but {self.task} has fixed labels: leave it out.")
        return task


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
        texts: The texts.
        folder: Folder of the run, or of the search.
        grid: Values to try; None for one run.
        words: The command, after `nystrom`.
    """

    asked: FinetuneOptions
    texts: Texts
    folder: Path
    grid: SearchGrid | None
    words: tuple[str, ...]

    def read(self) -> Material:
        """Read the texts.

        Raises:
            ValueError: Broken or missing texts or labels.
        """
        texts, task = self.texts, self.texts.chosen_task()
        found = read_labelled(texts.data, task, own=texts.task is None, kind=texts.labels, val_share=texts.val_share)
        if texts.task is None and found.classes is None:
            task = replace(task, metrics=NUMBER_METRICS)
        return Material(texts.name, task, found, ", ".join(str(path.resolve()) for path in texts.data), self.words)
