"""Save a transformers model so that it loads with its attention method.

`save_pretrained` keeps `config.attention_options` but drops the name of the method, so the folder would silently load
with exact attention. `save_with_attention` writes the name into config.json, as `attn_implementation`, where
transformers reads it: after `import nystrom.integrations` every `from_pretrained`, and so every pipeline, runs the
method; without that import, transformers raises an error that names it.

A configuration has one method name, which transformers passes to all parts. So a model whose parts differ cannot be
saved this way, nor one with a plan or `exact_layers` whose layers do not know their own numbers.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.utils import CONFIG_NAME

from nystrom.attention.plan import PLAN
from nystrom.integrations.attention_interface import SERVED
from nystrom.integrations.layer_numbers import PLACE
from nystrom.json_files import read_json
from nystrom.models.files.folder import SENTENCE_MODULES, sentence_modules, write_card
from nystrom.whole_files import write_whole


def save_with_attention(model: nn.Module, folder: Path) -> None:
    """Save a model, keeping the method of this library, or the plan, that `set_attention` gave to all of it.

    Args:
        model: A model of transformers, or a `SentenceTransformer` with such an encoder.
        folder: The folder to save to, as for `save_pretrained`.

    Raises:
        ValueError: The cases of `check_can_be_saved`, or an unsupported model; nothing is written.
    """
    encoder = next((part for part in model.modules() if isinstance(part, PreTrainedModel)), None)
    if encoder is None or not isinstance(save := getattr(model, "save_pretrained", None), Callable):
        raise ValueError(
            f"model is a {type(model).__name__}; expected a PreTrainedModel of transformers, or a SentenceTransformer "
            "that holds one. Save another by its state_dict."
        )
    if hasattr(model, "peft_config"):
        raise ValueError(
            f"model is a {type(model).__name__}, which saves its adapter alone: pass model.merge_and_unload(), or save "
            "by its save_pretrained and load with attn_implementation=."
        )
    check_can_be_saved(encoder)
    save(str(folder))
    method = encoder.config._attn_implementation
    if method not in SERVED:
        return
    listed = Path(folder) / SENTENCE_MODULES
    place = "" if encoder is model else sentence_modules(listed)[0]
    path = Path(folder) / place / CONFIG_NAME
    content = read_json(path) | {"attn_implementation": method}
    write_whole(path, json.dumps(content, indent=2, sort_keys=True) + "\n")
    write_card(path.parent)


def check_can_be_saved(model: PreTrainedModel) -> None:
    """Check that config.json can express how all parts of a model attend, if one of them runs a method.

    Raises:
        ValueError: Parts use different methods or options, or layers were numbered only in memory.
    """
    holders: dict[str, Any] = {
        name or type(model).__name__: module.config
        for name, module in model.named_modules()
        if getattr(module, "config", None) is not None
    }
    implementations: dict[str, str] = {}
    for name, config in holders.items():
        implementations.setdefault(config._attn_implementation, name)
    if not implementations.keys() & set(SERVED):
        return
    if len(implementations) > 1:
        parts = " and ".join(f"{implementation} in {name}" for implementation, name in implementations.items())
        raise ValueError(
            f"model attends by {parts}, and a saved model has the same attention in all parts: save it with "
            "save_pretrained, and call set_attention again after loading. To keep some layers exact, name them in "
            "exact_layers among the options, or set a plan."
        )
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        by_number = config is not None and (config._attn_implementation == PLAN or "exact_layers" in _options(config))
        if by_number and PLACE in module.__dict__:
            raise ValueError(
                f"{type(module).__name__} does not know its number (layer_idx), so a saved model could not find the "
                "layers of its plan or exact_layers again: save it with save_pretrained, a plan with plan.write(FILE), "
                "and call set_attention again after loading."
            )
    kept = [_options(config) for config in _saved(model.config)]
    for name, config in holders.items():
        if _options(config) not in kept:
            raise ValueError(
                f"{name} attends with attention_options={_options(config)}, which are in no part of model.config, so "
                "they would not be saved: save it with save_pretrained, and call set_attention again after loading."
            )


def _saved(config: Any) -> Iterator[Any]:
    """A configuration and those of its parts, which are saved with it."""
    yield config
    for name in config.sub_configs:
        if (part := getattr(config, name, None)) is not None:
            yield from _saved(part)


def _options(config: Any) -> dict[str, Any]:
    return getattr(config, "attention_options", None) or {}
