"""The format of a folder's config.json: this library's own, or the published one."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers.utils import CONFIG_NAME

from nystrom.json_files import read_json
from nystrom.models.files.published import PUBLISHED_TYPE, read_published

OWN_TYPE = "nystrom"


def as_own(content: dict[str, Any], changes: Mapping[str, Any], what: str) -> dict[str, Any]:
    """The fields of a configuration in either format, some of which `changes` replace; ValueError for another model."""
    came = content.get("model_type", OWN_TYPE)
    if came == PUBLISHED_TYPE:
        options = changes.get("attention_options")
        landmarks = options.get("num_landmarks") if isinstance(options, dict) else None
        content = read_published(content, num_landmarks=landmarks) | {"model_type": OWN_TYPE}
    elif came != OWN_TYPE:
        raise ValueError(
            f"{what} is of type {came!r}; expected {OWN_TYPE!r}, or {PUBLISHED_TYPE!r} for a published "
            "Nyströmformer. Convert a BERT or RoBERTa with nystrom convert."
        )
    if (content.get("design"), content.get("attention")) == ("authors", "linformer"):
        # Until it was an option, this design froze the projections.
        content = content | {"attention_options": {"frozen": True} | content.get("attention_options", {})}
    return content


def check_config_file(folder: Path) -> None:
    """Raise ValueError unless a folder holds a config.json that names its model."""
    file = folder / CONFIG_NAME
    if not file.is_file():
        raise ValueError(f"model is {folder}, which holds no {CONFIG_NAME}: name a saved model, such as RUN/best.")
    content = read_json(file)
    if not isinstance(content.get("model_type"), str):
        raise ValueError(f"{file} names no model_type; expected {OWN_TYPE!r} or {PUBLISHED_TYPE!r}.")
