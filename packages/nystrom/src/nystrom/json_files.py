"""JSON from files that anybody may have written: an object, or one line that says what is wrong and what to do.

A reader of JSON recurses once for each bracket that is open, and so does what copies or compares the result. Content
that is nested deeper than `DEEPEST` is therefore refused here, long before Python's own limit, and so is an object that
has a name twice: its readers would disagree on the value. NaN and Infinity, which are no JSON, are read as numbers,
since Python writes them; the checks of the fields decide on them.
"""

import json
from pathlib import Path
from typing import Any

DEEPEST = 100
_FETCH = (
    "name a folder in Hugging Face format, with config.json and model.safetensors in it, or fetch the model again (hf "
    "download NAME --local-dir FOLDER)"
)
_WORDS = {dict: "a JSON object", list: "a JSON array"}


def read_json(path: Path, *, remedy: str = _FETCH) -> dict[str, Any]:
    """Read a file that holds a JSON object.

    Args:
        path: The file.
        remedy: Advice in the error for a file that does not.

    Raises:
        ValueError: There is no such file, or it holds something else; the message names it.
        OSError: The file may not be read, or its disk fails.
    """
    return _read(path, dict, remedy)


def read_json_array(path: Path, *, remedy: str = _FETCH) -> list[Any]:
    """Read a file that holds a JSON array; see `read_json`."""
    return _read(path, list, remedy)


def parse_json(content: bytes, wanted: type = dict) -> Any:
    """Parse UTF-8 text that is one JSON object, or one array.

    Raises:
        ValueError: It is not; the message goes on after the name of the text, such as "is not UTF-8".
    """
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 ({error.reason} at byte {error.start})") from error
    try:
        value = json.loads(text, object_pairs_hook=_each_once)
    except RecursionError:
        raise ValueError(_too_deep()) from None
    except ValueError as error:
        raise ValueError(f"is not valid JSON ({error})") from error
    if not isinstance(value, wanted):
        raise ValueError(f"holds a {type(value).__name__}; expected {_WORDS[wanted]}")
    # A text with few brackets is not nested deeply: most have no need to be walked.
    if text.count("[") + text.count("{") > DEEPEST and _is_deep(value):
        raise ValueError(_too_deep())
    return value


def _read(path: Path, wanted: type, remedy: str) -> Any:
    # A pipe would be waited for.
    if not path.is_file():
        raise ValueError(f"{path} {'is not a file' if path.exists() else 'is missing'}: {remedy}.")
    try:
        return parse_json(path.read_bytes(), wanted)
    except ValueError as error:
        raise ValueError(f"{path} {error}: {remedy}.") from error
    except OSError as error:
        # A disk that fails in the middle of a file does not name it.
        raise OSError(error.errno, error.strerror, str(path)) from error


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"it has {next(name for name in names if names.count(name) > 1)!r} twice")
    return entries


def _is_deep(content: Any) -> bool:
    level = [content]
    for _ in range(DEEPEST):
        values = (value for each in level for value in (each.values() if isinstance(each, dict) else each))
        level = [value for value in values if isinstance(value, dict | list)]
        if not level:
            return False
    return True


def _too_deep() -> str:
    return f"is nested more than {DEEPEST} deep"
