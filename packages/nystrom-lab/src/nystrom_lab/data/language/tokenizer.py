"""The tokenizer beside a model.

It is loaded with AutoTokenizer. The published checkpoints have ALBERT's tokenizer, and some of their folders hold only
its `spiece.model`: AutoTokenizer cannot read that file alone, so AlbertTokenizer is used. Code in a folder is never
run.
"""

import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SENTENCEPIECE = "spiece.model"
_VOCABULARIES = ("tokenizer.json", _SENTENCEPIECE, "vocab.txt", "vocab.json", "sentencepiece.bpe.model")
_SETTINGS = "tokenizer_config.json"
# JSON files that transformers reads for a tokenizer, some without a limit on how deeply they are nested.
_OBJECTS = (_SETTINGS, "tokenizer.json", "vocab.json", "special_tokens_map.json", "added_tokens.json", "config.json")
_BROKEN = (ValueError, OSError, KeyError, TypeError, AttributeError)


def load_tokenizer(folder: str | Path) -> "PreTrainedTokenizerBase":
    """Load the tokenizer of a folder, or of a model OWNER/NAME on the Hugging Face Hub.

    Raises:
        ValueError: There is none, it is broken, or the package that reads it is missing.
    """
    from transformers import AlbertTokenizer, AutoTokenizer

    from nystrom.json_files import read_json

    path = Path(folder)
    kind: type = AutoTokenizer
    if path.is_dir():
        there = [name for name in _VOCABULARIES if (path / name).is_file()]
        if not there:
            raise ValueError(
                f"model {folder} holds no tokenizer ({', '.join(_VOCABULARIES)}): copy the files of the tokenizer that "
                "it was trained with into the folder."
            )
        read = {name: read_json(path / name) for name in _OBJECTS if (path / name).exists()}
        if "tokenizer.json" not in there and _SENTENCEPIECE in there:
            if find_spec("sentencepiece") is None:
                raise ValueError(
                    f"the tokenizer of model {folder} is {_SENTENCEPIECE}, which the package sentencepiece reads: "
                    "pip install sentencepiece."
                )
            kind = AlbertTokenizer if read.get(_SETTINGS, {}).get("tokenizer_class") is None else AutoTokenizer
    try:
        return kind.from_pretrained(str(folder), trust_remote_code=False)
    except Exception as error:
        # The package tokenizers raises a plain Exception.
        if type(error) is not Exception and not isinstance(error, _BROKEN):
            raise
        said = " ".join(str(error).split())
        raise ValueError(f"the tokenizer of model {folder} cannot be read ({said}): fetch it again.") from error


def save_tokenizer(tokenizer: "PreTrainedTokenizerBase", folder: Path) -> None:
    """Write the files of a tokenizer into a folder, or raise OSError."""
    try:
        tokenizer.save_pretrained(str(folder))
    except Exception as error:
        # The package tokenizers raises an Exception with the number of the error in its text.
        if (number := re.search(r"\(os error (\d+)\)", str(error))) is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(folder)) from error
