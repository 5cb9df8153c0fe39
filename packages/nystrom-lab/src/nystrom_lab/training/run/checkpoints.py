"""Whether a checkpoint is one of a run, after the step in its name, and unchanged.

Its `complete.json` lists its files with their checksums, and among them is a copy of the run.json of its run. Settings
and data are compared, so run.json may be indented in another way, and the data may move.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from nystrom.sums import find_fault, read_sums
from nystrom.whole_files import write_whole
from nystrom_lab.whole_folders import put_in_place, write_sums

SETTINGS = "run.json"
_STATE = "trainer_state.json"
# What only a run that goes on from a checkpoint reads; of the best one, the weights are used.
_FOR_TRAINING = (".pt", ".pth", ".bin", _STATE)


def complete(partial: Path, to: Path) -> None:
    """Record the files of a checkpoint that is written, and its run, and put it in its place in the run's folder.

    Raises:
        OSError: A file cannot be written.
    """
    run = to.parent / SETTINGS
    if run.is_file():
        write_whole(partial / SETTINGS, run.read_bytes())
    if state := state_of(partial):
        # A path, which is not the one that the checkpoint gets; the step is what counts.
        write_whole(partial / _STATE, json.dumps(state | {"best_model_checkpoint": None}, indent=2) + "\n")
    write_sums(partial)
    put_in_place(partial, to)


def state_of(checkpoint: Path) -> dict[str, Any]:
    """The trainer state in a checkpoint; empty if it cannot be read."""
    return _read(checkpoint / _STATE)


def fault_of(checkpoint: Path, step: int, *, weights: bool = False) -> str:
    """What is wrong with a checkpoint, or with its weights alone; "" if it is of its run, and unchanged."""
    return find_fault(checkpoint, besides=_FOR_TRAINING if weights else ()) or strangeness(checkpoint, step)


def strangeness(checkpoint: Path, step: int) -> str:
    """Why a checkpoint is none of the run around it after this step; "" if it is one. No checksum is compared."""
    try:
        written = read_sums(checkpoint)
    except FileNotFoundError:
        return "it has no record of its files"
    except ValueError as error:
        return str(error)
    if (saved := state_of(checkpoint).get("global_step", step)) != step:
        return f"it holds step {saved}"
    run = checkpoint.parent / SETTINGS
    if not run.is_file():
        return ""
    if entry := written.get(f"../{SETTINGS}"):
        # As earlier versions had it, of the file as they wrote it.
        texts = (run.read_bytes(), (json.dumps(_read(run), indent=1) + "\n").encode())
        same = entry[1] in (None, *(hashlib.sha256(text).hexdigest() for text in texts))
        return "" if same else f"{run} is not the file that it was written with"
    (settings, data), (others, other) = _settings_and_data(checkpoint / SETTINGS), _settings_and_data(run)
    # A setting that one lacks had its default; all of the run's are compared with those of the command.
    differ = sorted(name for name in settings.keys() & others if settings[name] != others[name])
    differ += [] if None in (data, other) or data == other else ["data"]
    return f"it is of a run with other {', '.join(differ)}" if differ else ""


def _settings_and_data(run: Path) -> tuple[dict[str, Any], str | None]:
    settings, data = (part if isinstance(part := _read(run).get(name), dict) else {} for name in ("settings", "data"))
    # Earlier versions had the first of two parts alone.
    return settings, str(data["fingerprint"]).partition("-")[0] if "fingerprint" in data else None


def _read(file: Path) -> dict[str, Any]:
    """The content of a JSON file; empty if it cannot be read."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
