"""One training of a study, in its own process, which ends when the parent process ends.

The engine's name and its arguments come as JSON on the command line; see `nystrom_lab.training.grid.child` for how the
process ends.
"""

import json
import sys
import threading
from pathlib import Path

from nystrom_lab.training.grid.child import end_with_parent, exit_code


def main() -> int:
    """Train, from the last checkpoint if there is one."""
    threading.Thread(target=end_with_parent, daemon=True).start()
    engine, arguments = json.loads(sys.argv[1])
    for name in ("data", "to", "model"):
        given = arguments.get(name)
        # The model of a fine-tuning may be a name on the Hub.
        if given is not None and (name != "model" or engine != "finetune"):
            arguments[name] = tuple(map(Path, given)) if isinstance(given, list) else Path(given)

    def work() -> None:
        if engine == "train":
            from nystrom_lab.training.train import train

            train(**arguments)
        elif engine == "pretrain":
            from nystrom_lab.training.pretrain.pretrain import pretrain

            pretrain(**arguments)
        else:
            from nystrom_lab.training.finetune.finetune import finetune

            finetune(**arguments)

    return exit_code(work)


if __name__ == "__main__":
    sys.exit(main())
