"""The identity of a saved model, in one line: a sum of each part that another model would differ in.

A training, a healing, a command that continues them, and their rows name the model that they start from by this line,
`weights-configuration-tokenizer-pooling`: 16 hexadecimal digits of a SHA-256 sum, then 8 for each other part. A part
without files is empty, and empty parts at the end are left out. Names and contents of the files count, the card and the
folder's own name do not.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from transformers.utils import CONFIG_NAME

from nystrom.models.files.folder import SENTENCE_MODULES, SENTENCE_SETTINGS, TOKENIZER_FILES, sentence_modules
from nystrom.sums import sha256

_PARTS = ("weights", "configuration", "tokenizer", "pooling")


def model_fingerprint(folder: Path) -> str:
    """The line of the model in a folder.

    Raises:
        ValueError: The model's modules.json is no list of modules, or names one outside the folder.
    """
    weights = _sum(folder, [path.name for path in folder.glob("*.safetensors")], digits=16)
    others = [_sum(folder, names, digits=8) for names in ([CONFIG_NAME], TOKENIZER_FILES, _pooling_files(folder))]
    return "-".join([weights, *others]).rstrip("-")


def changed_parts(now: str, before: str) -> list[str]:
    """The parts in which two models differ.

    A part that `before` lacks is not compared: earlier versions recorded the weights alone, and the files of a model of
    the Hugging Face Hub are downloaded as they are needed.
    """
    # `now` may lack the last ones.
    pairs = zip(_PARTS, before.split("-"), [*now.split("-"), "", "", ""], strict=False)
    return [part for part, old, new in pairs if old not in ("", new)]


def _pooling_files(folder: Path) -> list[str]:
    """The files of sentence-transformers after the encoder."""
    listed = folder / SENTENCE_MODULES
    if not listed.is_file():
        return []
    # The encoder's own place is the folder itself.
    modules = {folder / place for place in sentence_modules(listed)} - {folder}
    inside = [path.relative_to(folder).as_posix() for module in modules for path in module.rglob("*")]
    return [SENTENCE_MODULES, *SENTENCE_SETTINGS, *inside]


def _sum(folder: Path, names: Iterable[str], *, digits: int) -> str:
    files = {name: sha256(folder / name) for name in sorted({*names}) if (folder / name).is_file()}
    return hashlib.sha256(json.dumps(files).encode()).hexdigest()[:digits] if files else ""
