"""The function that runs in a SLURM job, with its output in a log.

submitit catches the signal before preemption or the time limit, and requeues the job; the function then continues from
its last checkpoint.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path

from submitit.helpers import Checkpointable

from nystrom_lab.training.grid.processes import open_log


class LoggedCall(Checkpointable):
    """A function of a module, whose output in a job is added to a log."""

    def __init__(self, function: Callable[..., object], log: Path):
        # Rows name the command that they come from.
        self.function, self.log, self.words = function, log, list(sys.argv)

    def __call__(self, *arguments: object) -> None:
        """Call the function."""
        with open_log(self.log) as log:
            for stream in (1, 2):
                os.dup2(log.fileno(), stream)
        sys.argv = self.words
        self.function(*arguments)
