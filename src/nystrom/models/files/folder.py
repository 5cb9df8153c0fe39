"""Folders in Hugging Face format: config.json, safetensors in one file or several, and a tokenizer.

Writing goes to a fresh folder that gets its name when all is in it, so that nothing half-written stays. What must hold
of weights before they are read stands in `nystrom.models.files.loading`.
"""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file
from torch import Tensor
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from nystrom.measure.rows import check_folder

if TYPE_CHECKING:
    from nystrom.models.configuration import EncoderConfig
    from nystrom.models.encoder import EncoderPreTrainedModel

_TOKENIZER_CONFIG = "tokenizer_config.json"
# What tokenizers of transformers read, whichever there are.
_TOKENIZER_FILES = (
    *("tokenizer.json", _TOKENIZER_CONFIG, "special_tokens_map.json", "added_tokens.json", "vocab.txt", "vocab.json"),
    *("merges.txt", "spiece.model", "sentencepiece.bpe.model", "tokenizer.model"),
)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        ValueError: The file is not there, or holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(
            f"{path} is missing: name a folder in Hugging Face format, with config.json and model.safetensors in it; "
            "a model of the hub must be downloaded first (hf download NAME --local-dir FOLDER)."
        ) from error
    except ValueError as error:
        raise ValueError(f"{path} is no JSON text ({error}): fetch the checkpoint again.") from error
    if not isinstance(content, dict):
        raise ValueError(
            f"{path} holds a {type(content).__name__}; expected a JSON object: fetch the checkpoint again."
        )
    return content


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder whose weights `nystrom.models.files.loading.check_weights` has let pass."""
    files = [folder / SAFE_WEIGHTS_NAME]
    if not files[0].is_file():
        files = [
            folder / place for place in sorted(set(read_json(folder / SAFE_WEIGHTS_INDEX_NAME)["weight_map"].values()))
        ]
    tensors: dict[str, Tensor] = {}
    for file in files:
        tensors |= load_file(file)
    return tensors


def model_class(config: "EncoderConfig", folder: Path) -> type["EncoderPreTrainedModel"]:
    """The class of `nystrom.models` that a configuration names; without a name the encoder alone.

    Raises:
        ValueError: It names something else.
    """
    import nystrom.models

    name = (config.architectures or ["EncoderModel"])[0]
    if name not in nystrom.models.__all__ or not name.startswith("Encoder") or name == "EncoderConfig":
        raise ValueError(f"{folder / 'config.json'} names the model {name!r}; expected one of nystrom.models.")
    return getattr(nystrom.models, name)


@contextmanager
def fresh_folder(to: Path) -> Iterator[Path]:
    """A folder to fill, which takes the name `to` at the end; if filling it fails, nothing of it stays.

    Raises:
        ValueError: `to` is there and is not an empty folder, or cannot be written.
    """
    check_fresh(to)
    check_folder(to.parent)
    with tempfile.TemporaryDirectory(prefix=f".{to.name}-", dir=to.parent) as around:
        partial = Path(around) / to.name
        partial.mkdir()
        yield partial
        if to.is_dir():
            to.rmdir()
        partial.rename(to)


def check_fresh(to: Path) -> None:
    """See that nothing would be overwritten.

    Raises:
        ValueError: There is something.
    """
    if to.is_dir():
        if any(to.iterdir()):
            raise ValueError(f"{to} is not empty: choose another folder.")
    elif to.exists() or to.is_symlink():
        raise ValueError(f"{to} is a file: choose another name.")


def copy_tokenizer(source: Path, to: Path, *, max_length: int, default_class: str | None = None) -> tuple[str, ...]:
    """Copy the tokenizer's files, with another longest input.

    Args:
        source: Folder with the tokenizer, if it has one.
        to: Folder that gets it.
        max_length: Tokens that the tokenizer is to cut longer inputs to, where it is asked to cut.
        default_class: Tokenizer of transformers for a folder that names none.

    Returns:
        The names of the files.

    Raises:
        ValueError: The tokenizer's configuration is no JSON object.
    """
    there = [name for name in _TOKENIZER_FILES if (source / name).is_file()]
    if not any(name not in (_TOKENIZER_CONFIG, "special_tokens_map.json", "added_tokens.json") for name in there):
        return ()
    for name in there:
        (to / name).write_bytes((source / name).read_bytes())
    settings = read_json(source / _TOKENIZER_CONFIG) if _TOKENIZER_CONFIG in there else {}
    settings["model_max_length"] = max_length
    if default_class is not None and settings.get("tokenizer_class") is None:
        settings["tokenizer_class"] = default_class
    (to / _TOKENIZER_CONFIG).write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return tuple(dict.fromkeys([*there, _TOKENIZER_CONFIG]))
