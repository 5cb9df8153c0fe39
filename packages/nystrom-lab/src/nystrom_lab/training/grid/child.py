"""One run of `nystrom lra run`, in its own process, which ends when the parent process ends.

The fields of `nystrom_lab.config.TrainOptions` come as JSON on the command line. Standard input is a pipe; the
parent holds its other end open and never writes to it: it closes when the parent ends, however it ends, and then this
process stops immediately, since a run may be cut off anywhere. The process of the next parent waits until this one has
released the run folder.
"""

import json
import os
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

# The exit code where no memory was left; the parent tries such a run again.
OUT_OF_MEMORY = 75
_WAIT_SECONDS = 120


def main() -> int:
    """Train, from the last checkpoint if there is one."""
    threading.Thread(target=end_with_parent, daemon=True).start()
    return exit_code(lambda: train_run(json.loads(sys.argv[1])))


def train_run(arguments: Mapping[str, Any]) -> None:
    """Train a run, from its last checkpoint if there is one."""
    from nystrom_lab.config import TrainOptions
    from nystrom_lab.training.run_folder import RunFolder
    from nystrom_lab.training.train import train

    run = RunFolder(Path(arguments["to"]))
    run.wait(_WAIT_SECONDS)
    paths = {name: Path(arguments[name]) for name in ("data", "model") if arguments.get(name) is not None}
    train(TrainOptions(**{**arguments, **paths, "to": run.path, "resume": run.is_started}))


def exit_code(work: Callable[[], object]) -> int:
    """Do some work, print any error, and return the exit code."""
    import torch

    try:
        work()
    except (MemoryError, torch.OutOfMemoryError) as error:
        print(f"out of memory: {error}", file=sys.stderr)
        return OUT_OF_MEMORY
    except (ValueError, OSError, ArithmeticError) as error:
        print(f"nystrom: {error}", file=sys.stderr)
        return 2
    return 0


def end_with_parent() -> None:
    """Wait for the end of the standard input, which the parent holds open, and exit."""
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
