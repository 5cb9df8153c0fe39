"""Folders in Hugging Face format: config.json, safetensors in one file or several, and a tokenizer.

A folder is written under a temporary name and renamed when complete, so no half-written folder remains.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from nystrom.input_files import read_input
from nystrom.json_files import read_json, read_json_array
from nystrom.models.files.config_file import OWN_TYPE
from nystrom.sums import CARD
from nystrom.temporary import temporary_folder
from nystrom.whole_files import check_folder, check_fresh, share_weights, write_whole

_TOKENIZER_CONFIG = "tokenizer_config.json"
_CARD_TEXT = """# A model with attention of nystrom

In Python `import nystrom.integrations` first. Then it loads as any folder of transformers or sentence-transformers, by
AutoModel or the Auto class of its head. Without the import no version of transformers knows it.
"""
# Files that the tokenizers of transformers read; a folder holds some of them.
TOKENIZER_FILES = (
    *("tokenizer.json", _TOKENIZER_CONFIG, "special_tokens_map.json", "added_tokens.json", "vocab.txt", "vocab.json"),
    *("merges.txt", "spiece.model", "sentencepiece.bpe.model", "tokenizer.model", "sentencepiece.model", "spm.model"),
    *("bpe.codes", "dict.txt", "entity_vocab.json"),
)

SENTENCE_MODULES = "modules.json"
# The first holds the longest input.
SENTENCE_SETTINGS = ("sentence_bert_config.json", "config_sentence_transformers.json")


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
        ValueError: `to` exists and is not an empty folder, at the beginning or at the end, or cannot be written.
    """
    check_fresh(to)
    check_folder(to.parent)
    with temporary_folder(to) as partial:
        yield partial
        share_weights(partial)
        check_fresh(to)
        if to.is_dir():
            to.rmdir()
        partial.rename(to)


def write_card(folder: Path) -> None:
    """Write into the card of a model what to import first, unless it has a card or transformers knows its format."""
    content = read_json(folder / CONFIG_NAME)
    ours = content.get("model_type") == OWN_TYPE or "attn_implementation" in content
    if ours and not (folder / CARD).exists():
        write_whole(folder / CARD, _CARD_TEXT)


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
    there = [name for name in TOKENIZER_FILES if (source / name).is_file()]
    if not any(name not in (_TOKENIZER_CONFIG, "special_tokens_map.json", "added_tokens.json") for name in there):
        return ()
    for name in there:
        write_whole(to / name, read_input(source / name))
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
        ValueError: The list of modules cannot be read, or names another folder for the encoder, or one outside; or a
            link leads outside.
    """
    listed = source / SENTENCE_MODULES
    if not listed.is_file():
        return ()
    places = sentence_modules(listed)
    if places[0]:
        raise ValueError(f"{listed} has its encoder in {places[0]!r}; expected it beside this file: move it there.")
    copied = [SENTENCE_MODULES, *(name for name in SENTENCE_SETTINGS if (source / name).is_file())]
    for name in copied:
        write_whole(to / name, read_input(source / name))
    if SENTENCE_SETTINGS[0] in copied:
        settings = read_json(source / SENTENCE_SETTINGS[0]) | {"max_seq_length": max_length}
        write_whole(to / SENTENCE_SETTINGS[0], json.dumps(settings, indent=2) + "\n")
    # One without settings of its own, a norm, may have no folder.
    folders = [place for place in places[1:] if (source / place).is_dir()]
    for place in folders:
        _copy_module(source, place, to)
    return (*copied, *folders)


def _copy_module(source: Path, place: str, to: Path) -> None:
    """Copy the files in the folder of a module; ValueError for a link to a folder, or to what lies outside."""
    root = source.resolve()
    # In the cache of the hub each file of a snapshot is a link to its content.
    inside = [root, *([root.parents[1] / "blobs"] if root.parent.name == "snapshots" else [])]
    (to / place).mkdir(parents=True, exist_ok=True)
    for path in sorted((source / place).rglob("*")):
        if path.is_symlink() and (path.is_dir() or not any(path.resolve().is_relative_to(each) for each in inside)):
            raise ValueError(
                f"{path} is a link to {path.readlink()}; expected a file inside {source}: put a copy in its place."
            )
        if not path.is_dir():
            copy = to / path.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            write_whole(copy, read_input(path), new=True)


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
