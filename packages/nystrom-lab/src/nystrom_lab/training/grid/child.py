"""A piece of work in its own process, which ends when the parent process ends.

The words are a function, as MODULE:NAME, and its arguments as JSON. Standard input is a pipe; the parent holds its
other end open and never writes to it: it closes when the parent ends, however it ends, and then this process stops
immediately, since a run may be cut off anywhere.
"""

import importlib
import json
import os
import sys
import threading
from collections.abc import Callable

# The exit code where no memory was left; the parent tries such a run again.
OUT_OF_MEMORY = 75


def main() -> int:
    """Do the work."""
    threading.Thread(target=end_with_parent, daemon=True).start()
    module, _, name = sys.argv[1].partition(":")
    return exit_code(lambda: getattr(importlib.import_module(module), name)(*json.loads(sys.argv[2])))


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
