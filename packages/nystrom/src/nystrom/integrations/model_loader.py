"""The one loader of a folder's model, of this library or of transformers, which runs nothing that the folder brings.

A config.json chooses what is imported: the class of the model, Python files beside it (`auto_map`), another file of
weights, and an attention that transformers takes from a package or fetches as compiled code. It is therefore read as
data of a stranger: the class is one of transformers' models for its type, and an attention one that torch or this
library computes. Everything else ends in a line that names the field. Weights are safetensors alone
(`nystrom.models.files.loading`).
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, MODEL_MAPPING, AutoConfig, AutoModel, PreTrainedModel
from transformers.utils import CONFIG_NAME

from nystrom.integrations.attention_interface import GUESSES, SERVED
from nystrom.json_files import read_json
from nystrom.models.classes import model_class
from nystrom.models.configuration import EncoderConfig
from nystrom.models.files.config_file import OWN_TYPE
from nystrom.models.files.loading import check_shapes, check_weights, report_held
from nystrom.models.files.published import PUBLISHED_TYPE

# Implementations that any part of a config.json may name; a wrong guess raises the line that names the method.
_COMPUTED_BY = {
    "attn_implementation": {"eager", "sdpa", "flex_attention", *SERVED, *GUESSES},
    "experts_implementation": {"eager", "batched_mm", "grouped_mm"},
}
_WRONG_VALUES = (StrictDataclassError, ImportError, LookupError, TypeError, AttributeError, ArithmeticError)


def read_model_config(folder: Path, **changes: Any) -> Any:
    """The configuration of a folder's model: an `EncoderConfig`, also of a published Nyströmformer, or transformers'.

    Args:
        folder: The folder.
        **changes: Fields of an `EncoderConfig`, in place of its own.

    Raises:
        ValueError: There is none, its type is unknown, or it asks for code or for what it cannot be.
    """
    file = folder / CONFIG_NAME
    content = read_json(file)
    kind = content.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise ValueError(f"model {folder} is of type {kind!r}, which transformers does not know: name another.")
    names = content.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{file} has architectures = {names!r}; expected the name of a class, in a list.")
    for part in _parts(content):
        _check_part(part, file, whole=part is content)
    if kind in (OWN_TYPE, PUBLISHED_TYPE):
        return EncoderConfig.from_pretrained(folder, **changes)
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (ValueError, OSError, *_WRONG_VALUES) as error:
        raise ValueError(f"{file} is not a valid configuration of {kind} ({_line(error)}): fetch it again.") from error


def load_model(
    folder: Path, kind: Any = None, *, config: Any = None, new_heads: bool = False
) -> tuple[Any, Mapping[str, Any]]:
    """Load the model of a folder, in evaluation mode.

    Args:
        folder: The folder.
        kind: The class, or one of transformers' Auto classes. None: the class that the folder names, and the encoder
            alone where transformers has none of that name.
        config: The configuration, from `read_model_config`; None reads it.
        new_heads: Whether the head may be new; a pooler always may.

    Returns:
        The model, and transformers' report of missing and unexpected weights.

    Raises:
        ValueError: The cases of `read_model_config` and `check_weights`, a class that is no model of this type, or
            weights that do not fit.
    """
    config = read_model_config(folder) if config is None else config
    if isinstance(config, EncoderConfig):
        kind = model_class(config, folder) if kind is None else kind
        return kind.from_pretrained(folder, config=config, output_loading_info=True, ignore_mismatched_sizes=new_heads)
    check_weights(folder)
    kind = _class_of(config, folder) if kind is None else kind
    with report_held():
        try:
            model, report = kind.from_pretrained(
                folder,
                config=config,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
        except (RuntimeError, *_WRONG_VALUES) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise ValueError(f"model {folder} cannot be made from its {CONFIG_NAME} ({_line(error)}).") from error
        if not new_heads:
            check_shapes(report, folder)
        _check_encoder(model, report, folder, new_heads=new_heads)
    return model.eval(), report


def _class_of(config: Any, folder: Path) -> Any:
    """The class that a configuration names, if it is one of transformers' models for this configuration."""
    name = (config.architectures or [AutoModel.__name__])[0]
    named = getattr(transformers, name, None)
    if named is None or named is AutoModel:
        if type(config) not in MODEL_MAPPING:
            raise ValueError(f"model {folder} is a {name}, of which transformers has no encoder: name another.")
        return AutoModel
    is_model = isinstance(named, type) and issubclass(named, PreTrainedModel)
    if not is_model or named.config_class is not type(config):
        raise ValueError(
            f"{folder / CONFIG_NAME} names the model {name!r}, which is no model of type {config.model_type!r} in "
            "transformers: name another, or write the class that it was saved from."
        )
    return named


def _parts(content: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """A configuration, and all that it holds."""
    yield content
    for value in content.values():
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, Mapping):
                yield from _parts(each)


def _check_part(part: Mapping[str, Any], file: Path, *, whole: bool) -> None:
    """Raise ValueError for the first field that would have something else run, or loaded, than this file is for."""
    for field, known in _COMPUTED_BY.items():
        for name in (field, f"_{field}"):
            for value in _values(part.get(name)):
                if value is not None and (not isinstance(value, str) or value not in known):
                    raise ValueError(
                        f"{file} has {name} = {value!r}, which a package or downloaded code would compute: remove it, "
                        "or name one of torch, such as 'eager', or a method of nystrom."
                    )
    # transformers' own class loads the whole model, but it builds parts without asking whether their code is trusted.
    for name in ("transformers_weights", *(() if whole else ("auto_map",))):
        if name in part:
            raise ValueError(f"{file} has {name} = {part[name]!r}, which is not followed: remove it, or name another.")


def _values(entry: Any) -> list[Any]:
    """The names that a field holds: one, or one for each part."""
    return [name for each in entry.values() for name in _values(each)] if isinstance(entry, Mapping) else [entry]


def _check_encoder(model: Any, report: Mapping[str, Any], folder: Path, *, new_heads: bool) -> None:
    """Raise ValueError for the first weight of the encoder that is missing, left over or of the wrong size."""
    prefix = f"{model.base_model_prefix}."
    lacking = {*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])}
    for name in sorted(lacking | set(report["unexpected_keys"])):
        inside = name.removeprefix(prefix)
        whole = name in lacking and (model.base_model is model or not new_heads)
        if (whole or name.startswith(prefix) or ".layer." in name) and not inside.startswith("pooler."):
            raise ValueError(
                f"model {folder} does not fit its config.json, for example in {name}: save or fetch the model again."
            )


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
