"""Folders in Hugging Face format: config.json, safetensors in one file or several, and a tokenizer.

A folder is written under a temporary name and gets its own when it is complete, so nothing half-written is left. The
checks of weights before they are read are in `nystrom.models.files.loading`.
"""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from nystrom.models.files.json_object import read_json
from nystrom.whole_files import check_folder, write_whole

_TOKENIZER_CONFIG = "tokenizer_config.json"
# What the tokenizers of transformers read; a folder holds some of them.
_TOKENIZER_FILES = (
    *("tokenizer.json", _TOKENIZER_CONFIG, "special_tokens_map.json", "added_tokens.json", "vocab.txt", "vocab.json"),
    *("merges.txt", "spiece.model", "sentencepiece.bpe.model", "tokenizer.model"),
)


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder that has passed `nystrom.models.files.loading.check_weights`."""
    files = [folder / SAFE_WEIGHTS_NAME]
    if not files[0].is_file():
        files = [
            folder / place for place in sorted(set(read_json(folder / SAFE_WEIGHTS_INDEX_NAME)["weight_map"].values()))
        ]
    tensors: dict[str, Tensor] = {}
    for file in files:
        tensors |= load_file(file)
    return tensors


@contextmanager
def fresh_folder(to: Path) -> Iterator[Path]:
    """A folder to fill, which is renamed to `to` at the end; if filling it fails, nothing of it is left.

    Raises:
        ValueError: `to` exists and is not an empty folder, or cannot be written.
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
    """Check that nothing would be overwritten.

    Raises:
        ValueError: `to` is a file, or a folder that is not empty.
    """
    if to.is_dir():
        if any(to.iterdir()):
            raise ValueError(f"{to} is not empty: choose another folder.")
    elif to.exists() or to.is_symlink():
        raise ValueError(f"{to} is a file: choose another name.")


def copy_tokenizer(source: Path, to: Path, *, max_length: int, default_class: str | None = None) -> tuple[str, ...]:
    """Copy the tokenizer's files, with another maximal length.

    Args:
        source: Folder with the tokenizer, if it has one.
        to: Folder that receives it.
        max_length: Tokens to which the tokenizer truncates longer inputs, where it is asked to truncate.
        default_class: Tokenizer of transformers for a folder that names none.

    Returns:
        The names of the files; empty where `source` has no tokenizer.

    Raises:
        ValueError: The tokenizer's configuration is not a JSON object.
    """
    there = [name for name in _TOKENIZER_FILES if (source / name).is_file()]
    if not any(name not in (_TOKENIZER_CONFIG, "special_tokens_map.json", "added_tokens.json") for name in there):
        return ()
    for name in there:
        write_whole(to / name, (source / name).read_bytes())
    settings = read_json(source / _TOKENIZER_CONFIG) if _TOKENIZER_CONFIG in there else {}
    settings["model_max_length"] = max_length
    if default_class is not None and settings.get("tokenizer_class") is None:
        settings["tokenizer_class"] = default_class
    write_whole(to / _TOKENIZER_CONFIG, json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
    return tuple(dict.fromkeys([*there, _TOKENIZER_CONFIG]))
