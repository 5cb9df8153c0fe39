"""Files that hold one JSON object, such as config.json."""

import json
from pathlib import Path
from typing import Any


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that holds a JSON object; ValueError if it is missing, or holds something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(
            f"{path} is missing: name a folder in Hugging Face format, with config.json and model.safetensors in it; "
            "a model on the hub must be downloaded first (hf download NAME --local-dir FOLDER)."
        ) from error
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}): fetch the checkpoint again.") from error
    if not isinstance(content, dict):
        raise ValueError(
            f"{path} holds a {type(content).__name__}; expected a JSON object: fetch the checkpoint again."
        )
    return content
