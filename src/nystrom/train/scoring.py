"""How well a model classifies a split: the share of samples whose largest logit is that of their class.

Every sample counts once, the last batch is no exception.
"""

from pathlib import Path

import torch
from torch.utils.data import DataLoader

from nystrom.encoder import EncoderConfig, EncoderForSequenceClassification
from nystrom.encoder.loading import check_fit
from nystrom.train.batches import collate, shortest_first
from nystrom.train.data import Split, Task

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(folder: Path, task: str, wanted: Task) -> EncoderForSequenceClassification:
    """Load a saved model, and see that it is one of the task.

    Args:
        folder: What `save_pretrained` wrote.
        task: Name of the task.
        wanted: The task.

    Raises:
        ValueError: The folder holds no model of this library, one of another task, or an incomplete one.
    """
    if not (folder / "config.json").is_file():
        raise ValueError(f"model is {folder}, which holds no config.json: name a saved model, such as RUN/best.")
    config = EncoderConfig.from_pretrained(folder)
    came = (config.task, config.vocab_size, config.num_labels)
    if came != (task, wanted.vocab_size, wanted.num_labels):
        raise ValueError(
            f"model {folder} was trained on {came[0]}, with {came[1]} tokens and {came[2]} classes; expected {task}, "
            f"with {wanted.vocab_size} tokens and {wanted.num_labels} classes: name a model of this task."
        )
    model, report = EncoderForSequenceClassification.from_pretrained(folder, config=config, output_loading_info=True)
    check_fit(model, report, folder, new_heads=False)
    return model


@torch.no_grad()
def accuracy(
    model: EncoderForSequenceClassification, split: Split, *, batch_size: int, device: str, precision: str
) -> float:
    """The share of samples that a model classifies rightly.

    Args:
        model: The model; is moved to the device.
        split: The samples.
        batch_size: Samples at a time; changes nothing but speed and memory.
        device: "cpu" or "cuda".
        precision: What to compute in.
    """
    model.to(device)  # pyright: ignore[reportArgumentType] (transformers types it away)
    model.eval()
    right = 0
    loader = DataLoader(
        split,  # pyright: ignore[reportArgumentType] (a dataset by its methods)
        batch_size=batch_size,
        sampler=shortest_first(split.lengths),
        collate_fn=collate,
    )
    for batch in loader:
        batch = {name: value.to(device) for name, value in batch.items()}
        with torch.autocast(device, DTYPES[precision], enabled=precision != "float32"):
            logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        right += int((logits.argmax(dim=-1) == batch["labels"]).sum())
    return right / len(split)
