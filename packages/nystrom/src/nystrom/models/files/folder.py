"""Folders in Hugging Face format: config.json, safetensors in one file or several, and a tokenizer.

A folder is written under a temporary name and renamed when complete, so no half-written folder remains.
"""

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from nystrom.json_files import read_json, read_json_array
from nystrom.models.files.config_file import OWN_TYPE
from nystrom.sums import CARD
from nystrom.whole_files import check_folder, check_no_link, write_whole

_TOKENIZER_CONFIG = "tokenizer_config.json"
_CARD_TEXT = """# A model with attention of nystrom

In Python `import nystrom.integrations` first. Then it loads as any folder of transformers or sentence-transformers, by
AutoModel or the Auto class of its head. Without the import no version of transformers knows it.
"""
# What the tokenizers of transformers read; a folder holds some of them.
_TOKENIZER_FILES = (
    *("tokenizer.json", _TOKENIZER_CONFIG, "special_tokens_map.json", "added_tokens.json", "vocab.txt", "vocab.json"),
    *("merges.txt", "spiece.model", "sentencepiece.bpe.model", "tokenizer.model"),
)

SENTENCE_MODULES = "modules.json"
# The first holds the longest input.
_SENTENCE_SETTINGS = ("sentence_bert_config.json", "config_sentence_transformers.json")


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Read all tensors of a folder that has passed `nystrom.models.files.loading.check_weights`."""
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
    """A temporary folder to fill, renamed to `to` at the end; if filling it fails, it is removed.

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


def write_card(folder: Path) -> None:
    """Write into the card of a model what to import first, unless it has a card or transformers knows its format."""
    content = read_json(folder / CONFIG_NAME)
    ours = content.get("model_type") == OWN_TYPE or "attn_implementation" in content
    if ours and not (folder / CARD).exists():
        write_whole(folder / CARD, _CARD_TEXT)


def check_fresh(to: Path) -> None:
    """Raise ValueError if something would be overwritten: a file, a link, or a folder that is not empty."""
    check_no_link(to)
    if to.is_dir():
        if any(to.iterdir()):
            raise ValueError(f"{to} is not empty: choose another folder.")
    elif to.exists():
        raise ValueError(f"{to} is a file: choose another name.")


def copy_tokenizer(source: Path, to: Path, *, max_length: int, default_class: str | None = None) -> tuple[str, ...]:
    """Copy the tokenizer's files, with a new maximum length.

    Args:
        max_length: Tokens to which the tokenizer truncates longer inputs, if truncation is requested.
        default_class: Tokenizer of transformers for a folder that names none.

    Returns:
        The names of the files; empty if `source` has no tokenizer.

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


def copy_sentence_modules(source: Path, to: Path, *, max_length: int) -> tuple[str, ...]:
    """Copy the sentence-transformers files of an encoder, which is the first module: list, pooling, norm and prompts.

    Texts are truncated to `max_length` tokens from then on.

    Returns:
        The names of files and folders; empty if `source` is not such a model.

    Raises:
        ValueError: The list of modules cannot be read, or names another folder for the encoder, or one outside.
    """
    listed = source / SENTENCE_MODULES
    if not listed.is_file():
        return ()
    places = sentence_modules(listed)
    if places[0]:
        raise ValueError(f"{listed} has its encoder in {places[0]!r}; expected it beside this file: move it there.")
    copied = [SENTENCE_MODULES, *(name for name in _SENTENCE_SETTINGS if (source / name).is_file())]
    for name in copied:
        write_whole(to / name, (source / name).read_bytes())
    if _SENTENCE_SETTINGS[0] in copied:
        settings = read_json(source / _SENTENCE_SETTINGS[0]) | {"max_seq_length": max_length}
        write_whole(to / _SENTENCE_SETTINGS[0], json.dumps(settings, indent=2) + "\n")
    # One without settings of its own, a norm, may have no folder.
    folders = [place for place in places[1:] if (source / place).is_dir()]
    for place in folders:
        shutil.copytree(source / place, to / place)
    return (*copied, *folders)


def sentence_modules(listed: Path) -> list[str]:
    """The folders in a modules.json of sentence-transformers, relative to it; ValueError if it is none, or one lies
    outside.
    """
    modules = read_json_array(listed)
    named = [module.get("path") for module in modules if isinstance(module, dict)]
    places = [place for place in named if isinstance(place, str)]
    if len(places) < len(modules):
        raise ValueError(f"{listed} is not a list of modules with a path each: save or fetch the model again.")
    root = listed.parent.resolve()
    for place in places:
        if not (root / place).resolve().is_relative_to(root):
            raise ValueError(f"{listed} names the module {place!r}; expected a folder inside {listed.parent}.")
    if not places:
        raise ValueError(f"{listed} lists no modules; expected an encoder first.")
    return places
