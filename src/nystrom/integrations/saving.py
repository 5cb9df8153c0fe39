"""Saving a transformers model so that it comes back with its attention.

`save_pretrained` keeps `config.attention_options` and drops the name of the method, so the folder would load with exact
attention, and nothing would say so. `save_with_attention` writes the name into config.json, as `attn_implementation`,
from where transformers takes it: after `import nystrom.integrations` every `from_pretrained`, and so every pipeline,
runs the method; without that import, transformers raises an error that names it.
"""

import json
from pathlib import Path

from transformers import PreTrainedModel
from transformers.utils import CONFIG_NAME

from nystrom.integrations.attention_interface import SERVED
from nystrom.models.files.json_object import read_json


def save_with_attention(model: PreTrainedModel, folder: Path) -> None:
    """Save a model; a method of this library, or a plan, that `set_attention` gave to all of it is kept.

    Args:
        model: The model.
        folder: Where `save_pretrained` puts it.
    """
    model.save_pretrained(folder)
    method = model.config._attn_implementation
    if method not in SERVED:
        return
    path = Path(folder) / CONFIG_NAME
    content = read_json(path) | {"attn_implementation": method}
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
