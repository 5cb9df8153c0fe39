"""The accuracy of a model on a split: the share of samples whose largest logit is that of their class.

Every sample counts once, including those of the last batch.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from nystrom.checks import check_at_least
from nystrom.models import EncoderConfig
from nystrom.models.files.loading import check_fit
from nystrom.models.files.model_fingerprint import model_fingerprint
from nystrom.progress import Progress
from nystrom_lab.config import EvaluateOptions
from nystrom_lab.data.lra.facts import LRA
from nystrom_lab.data.store.prepared_folder import verify
from nystrom_lab.data.store.split import Split
from nystrom_lab.measure.rows import Row
from nystrom_lab.training.batches import shortest_first
from nystrom_lab.training.finite import check_outputs
from nystrom_lab.training.hardware import usable_device, usable_precision
from nystrom_lab.training.results import Provenance, accuracy_row
from nystrom_lab.training.run_progress import no_file_bars
from nystrom_lab.training.tasks import Model, Task, check_data, check_lengths, find_task, prepared_folder

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def evaluate(options: EvaluateOptions) -> Row:
    """Evaluate a saved model on all samples of one split.

    Returns:
        The accuracy as a row of `nystrom_lab.measure.rows`, between 0 and 1, with its 95 % interval.

    Raises:
        ValueError: An invalid name, folder, device or precision, or a model for another task or other classes.
    """
    check_at_least("batch_size", options.batch_size, 1)
    device = usable_device(options.device)
    precision, model = usable_precision(options.precision, device), Path(options.model)
    check_data(options.task, Path(options.data))
    task = find_task(options.task)
    folder = prepared_folder(options.task, Path(options.data), max_length=num_positions(model), columns=options)
    verify(folder, task=options.task)
    samples = task.open(folder, options.split)
    if len(samples) == 0:
        raise ValueError(
            f"data {folder} holds no samples in {options.split}; expected at least one: name another with --split."
        )
    with no_file_bars():
        loaded = load_model(model, options.task, classes=samples.classes)
    check_lengths(folder, options.split, samples, loaded.config.max_position_embeddings)
    share = accuracy(loaded, samples, task, batch_size=options.batch_size, device=device, precision=precision)
    provenance = Provenance(device, precision, seed=None, facts={"fingerprint": model_fingerprint(model)})
    return accuracy_row(loaded.config, f"{options.split} accuracy", share, len(samples), provenance)


def load_model(folder: Path, task: str, *, classes: Sequence[str]) -> Model:
    """Load a saved model, and check that it is one of the task.

    Args:
        classes: Labels of the classes of the data. They must be the model's, in the same order; if either side only has
            numbers, they are matched by order, with a warning.

    Raises:
        ValueError: The folder holds no model of this library, one for another task or other classes, or an incomplete
            one.
    """
    config, facts = _read_config(folder), LRA[task]
    came = (config.task, config.vocab_size, config.num_labels)
    if came != (task, facts.vocab_size, len(classes)):
        raise ValueError(
            f"model {folder} was trained on {came[0] or 'no task of the arena'}, with {came[1]} tokens and {came[2]} "
            f"classes; expected {task}, with {facts.vocab_size} tokens and {len(classes)} classes: name a model of it."
        )
    _check_classes(folder, config, classes)
    model, report = find_task(task).model.from_pretrained(folder, config=config, output_loading_info=True)
    check_fit(model, report, folder, new_heads=False)
    return model


def num_positions(folder: Path) -> int:
    """The longest input of a saved model.

    Raises:
        ValueError: The folder holds no model of this library.
    """
    return _read_config(folder).max_position_embeddings


def _check_classes(folder: Path, config: EncoderConfig, classes: Sequence[str]) -> None:
    """Compare the labels of a model with the same number of labels of the data."""
    assert config.id2label is not None, "transformers gives every configuration its labels"
    of_model = [str(label) for _, label in sorted(config.id2label.items())]
    if of_model == list(classes):
        return
    models, datas = (", ".join(map(repr, names[:20])) for names in (of_model, classes))
    if _is_numbered(of_model) or _is_numbered(classes):
        print(
            f"warning: the classes of model {folder} are {models}, those of the data {datas}: they are assumed "
            "to be the same, in this order.",
            file=sys.stderr,
        )
        return
    raise ValueError(
        f"model {folder} was trained on the classes {models}, but those of the data are {datas}: name a model of these "
        "classes, or prepare the data with the labels of the model."
    )


def _is_numbered(names: Sequence[str]) -> bool:
    """Whether labels are only their own positions: numbers from 0, or the default names of transformers."""
    return any(all(name == f"{word}{i}" for i, name in enumerate(names)) for word in ("", "LABEL_"))


def _read_config(folder: Path) -> EncoderConfig:
    if not (folder / "config.json").is_file():
        raise ValueError(f"model is {folder}, which holds no config.json: name a saved model, such as RUN/best.")
    return EncoderConfig.from_pretrained(folder)


def is_right(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Whether the largest logit of each sample is that of its class."""
    return logits.argmax(dim=-1) == labels


def accuracy(model: Model, split: Split, task: Task, *, batch_size: int, device: str, precision: str) -> float:
    """The share of samples that a model classifies correctly.

    Args:
        model: The model; it is moved to the device.
        batch_size: Samples per batch; affects only speed and memory.

    Raises:
        NotFinite: A logit is not a finite number.
    """
    collate = partial(task.collate, most=model.config.max_position_embeddings)

    def score(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return is_right(check_outputs(model(**batch).logits), batch["labels"])

    right = score_batches(model, split, collate, score, batch_size=batch_size, device=device, precision=precision)
    return int(right.sum()) / len(split)


@torch.no_grad()
def score_batches(
    model: Any,
    samples: Any,
    collate: Callable[..., dict[str, torch.Tensor]],
    score: Callable[[dict[str, torch.Tensor]], torch.Tensor],
    *,
    batch_size: int,
    device: str,
    precision: str,
    progress: Progress | None = None,
) -> torch.Tensor:
    """The scores of all samples on the CPU, from the shortest sample to the longest.

    Args:
        model: The model; it is moved to the device, and left in evaluation mode.
        batch_size: Samples per batch; affects only speed and memory.
        progress: Counts the samples, where these are some of more; None for one of these alone.
    """
    model.to(device).eval()
    sampler, scores = shortest_first(samples.lengths), list[torch.Tensor]()
    counted = Progress("scoring", len(samples), unit="samples") if progress is None else progress
    for batch in DataLoader(samples, batch_size=batch_size, sampler=sampler, collate_fn=collate):
        batch = {name: value.to(device) for name, value in batch.items()}
        with torch.autocast(device, DTYPES[precision], enabled=precision != "float32"):
            scores.append(score(batch).cpu())
        counted.update(len(scores[-1]))
    if progress is None:
        counted.close()
    return torch.cat(scores)
