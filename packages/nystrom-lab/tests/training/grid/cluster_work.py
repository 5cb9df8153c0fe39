"""Pieces of work for the tests of jobs; a job imports them by name."""

import os
import time
from pathlib import Path


def write(to: str, name: str) -> None:
    """Write a file as soon as the file `go` is there."""
    print(f"{name} starts", flush=True)
    (Path(to) / f"{name}.pid").write_text(str(os.getpid()))
    while not (Path(to) / "go").exists():
        time.sleep(0.05)
    (Path(to) / f"{name}.done").touch()


def fail(to: str, name: str) -> None:
    """Raise an error."""
    raise ValueError("this cannot be done")
