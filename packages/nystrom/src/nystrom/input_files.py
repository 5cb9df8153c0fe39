"""Files that users name, checked before they are opened and before torch is imported.

A pipe or a device, such as /dev/zero, may never end, or never begin: only regular files are opened.
"""

import io
import stat
from pathlib import Path


def open_input(path: Path, *, buffering: int = io.DEFAULT_BUFFER_SIZE) -> io.BufferedReader:
    """Open a regular file to read its bytes.

    Raises:
        ValueError: It is a pipe, a device or a socket.
        OSError: It cannot be opened.
    """
    check_regular(path)
    return io.BufferedReader(io.FileIO(path), buffering)


def read_input(path: Path) -> bytes:
    """Read the bytes of a regular file; raises as `open_input`."""
    with open_input(path) as file:
        return file.read()


def check_regular(path: Path) -> None:
    """Raise ValueError for what is there and is neither a file nor a folder."""
    try:
        mode = path.stat().st_mode
    except OSError:
        # Whoever opens it tells this.
        return
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        kind = "a pipe" if stat.S_ISFIFO(mode) else "a socket" if stat.S_ISSOCK(mode) else "a device"
        raise ValueError(f"{path} is {kind}, which may never end: write its content to a file, and name that.")


def check_model(name: str | Path) -> None:
    """Check what names a model, a folder or one on the Hugging Face Hub.

    Raises:
        ValueError: A file, or neither a folder nor a valid name; or a folder that holds a pipe or a device.
    """
    path = Path(name)
    if path.is_dir():
        check_model_folder(path)
    elif path.is_file():
        raise ValueError(f"model is the file {path}; expected the folder that holds it, with its config.json.")
    elif path.is_absolute() or len(path.parts) != 2 or path.parts[0] in (".", ".."):
        raise ValueError(
            f"model is {str(name)!r}; expected a folder, or OWNER/NAME of a model on the Hugging Face Hub."
        )


def check_model_folder(folder: Path) -> None:
    """Check the folder of a model, before anything in it is read.

    Raises:
        ValueError: It is not a folder, is that of a training, whose model is in a folder of it, or holds a pipe or a
            device.
    """
    if not folder.is_dir():
        raise ValueError(
            f"model is {folder}, which is not a folder; expected one with config.json and safetensors: check the name, "
            "or download a model of the hub first (hf download NAME --local-dir FOLDER)."
        )
    if not (folder / "config.json").exists() and (folder / "best" / "config.json").is_file():
        raise ValueError(f"model is {folder}, the folder of a training: name its best model, {folder / 'best'}.")
    for path in folder.iterdir():
        check_regular(path)
