"""One run of `nystrom lra run`, in a process of its own that ends with the one that started it.

The arguments of `nystrom.train.engine.train` come as JSON on the command line. Standard input is a pipe whose other
end the parent holds open and never writes to: it closes when the parent ends, however it ends, and then this process
stops on the spot, since a run may be cut off anywhere. A lock beside the run folder keeps the next parent's process
waiting until this one has gone.
"""

import json
import os
import sys
import threading
from pathlib import Path

# No room left: of memory, as the parent understands it, and of nothing else.
OUT_OF_MEMORY = 75
_WAIT_SECONDS = 120


def main() -> int:
    """Train, from the last checkpoint where there is one."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    arguments = json.loads(sys.argv[1])
    # Rows name the command that makes this run alone.
    sys.argv = ["nystrom", *train_words(arguments)]

    import torch
    from filelock import FileLock

    from nystrom.train.engine import train

    to = Path(arguments.pop("to"))
    with FileLock(to.with_name(f".{to.name}.lock"), timeout=_WAIT_SECONDS):
        try:
            resume = (to / "run.json").is_file()
            train(**arguments | {"data": Path(arguments["data"])}, to=to, resume=resume)
        except (MemoryError, torch.OutOfMemoryError) as error:
            print(f"out of memory: {error}", file=sys.stderr)
            return OUT_OF_MEMORY
        except (ValueError, OSError, ArithmeticError) as error:
            print(f"nystrom: {error}", file=sys.stderr)
            return 2
    return 0


def train_words(arguments: dict[str, object]) -> list[str]:
    """The words of `nystrom train` for these arguments of `train`; what is None or False has no word."""
    words = ["train", str(arguments["task"])]
    for name, value in arguments.items():
        if name != "task" and value is not None and value is not False:
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return words


def _end_with_parent() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
