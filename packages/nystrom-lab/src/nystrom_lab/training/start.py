"""The saved model that a training starts from, as read and checked by every training."""

import hashlib
import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig

import nystrom.integrations  # noqa: F401 (registers the methods that config.json may name)
from nystrom.models import EncoderConfig
from nystrom.models.files.json_object import read_json
from nystrom.models.files.loading import check_weights
from nystrom.models.files.published import PUBLISHED_TYPE
from nystrom.sums import sha256
from nystrom_lab.training.presets import MethodSetting

OWN_TYPES = (EncoderConfig.model_type, PUBLISHED_TYPE)


@dataclass(frozen=True)
class StartModel:
    """A saved model.

    Attributes:
        folder: Its folder.
        weights: Checksum of its weights.
        config: Its configuration; an `EncoderConfig` for a model of this library and a published Nyströmformer.
    """

    folder: Path
    weights: str
    config: Any

    @property
    def own(self) -> bool:
        """Whether it is a model of this library."""
        return isinstance(self.config, EncoderConfig)

    @property
    def method(self) -> MethodSetting:
        """Its attention, in the form of a preset; for a model of this library."""
        config = self.config
        return MethodSetting(config.attention_options, config.conv_kernel_size, config.share_attention_weights)


def find_start(folder: Path, kinds: Collection[str] | None = None, **changes: Any) -> StartModel:
    """Read the model of a folder.

    Args:
        folder: Folder with config.json and the weights.
        kinds: The model types that the training accepts; None for all that transformers knows.
        **changes: Fields of the configuration of a model of this library, in place of its own.

    Raises:
        ValueError: The folder holds no model, one of another type, or no complete safetensors.
    """
    if not (folder / "config.json").is_file() and (folder / "best" / "config.json").is_file():
        raise ValueError(f"model is {folder}, a run: name its best model {folder / 'best'}, or one of its checkpoints.")
    if not (folder / "config.json").is_file():
        check_weights(folder)
        raise ValueError(f"model is {folder}, which holds no config.json: name a saved model, such as RUN/best.")
    kind = model_type(folder)
    if kind is None or (kinds is not None and kind not in kinds):
        expected = "one" if kinds is None else " or ".join(map(repr, kinds))
        raise ValueError(f"model {folder} is of type {kind!r}; expected {expected}.")
    check_weights(folder)
    if kind in OWN_TYPES:
        config: Any = EncoderConfig.from_pretrained(folder, **changes)
    else:
        try:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        except (ValueError, KeyError, OSError) as error:
            raise ValueError(
                f"model {folder} is of type {kind!r}, which transformers does not know ({error})."
            ) from error
    files = {path.name: sha256(path) for path in sorted(folder.glob("*.safetensors"))}
    return StartModel(folder, hashlib.sha256(json.dumps(files).encode()).hexdigest()[:16], config)


def model_type(folder: Path) -> str | None:
    """The type that the config.json of a folder names; None if there is none."""
    return read_json(folder / "config.json").get("model_type") if (folder / "config.json").is_file() else None
