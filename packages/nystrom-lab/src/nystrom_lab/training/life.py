"""The life of a run, the same for `train`, `pretrain`, `finetune` and `heal`.

1. Refuse: a folder that holds something else, then settings that cannot be used; all that determines the result.
2. Lock the folder, which is new, or holds this run, which is to continue.
3. Compare the fingerprint of the data; a run that is finished ends here.
4. Make the model, then write run.json: the run has started.
5. Train to the last step, from the last checkpoint if there is one.
6. Evaluate the best checkpoint, and write its model and the results.
"""

import functools
import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from transformers import set_seed

from nystrom_lab.config import Resolved, RunOptions, command_line
from nystrom_lab.training.hardware import is_main
from nystrom_lab.training.run_folder import RunFolder
from nystrom_lab.training.run_progress import no_file_bars
from nystrom_lab.training.run_trainer import RunTrainer, run_to_the_end

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound=Resolved)
O = TypeVar("O", bound=RunOptions)


class Data(NamedTuple):
    """The folders that the data of a run come from, and their fingerprint."""

    folder: str
    fingerprint: str


class Kind(ABC, Generic[O, S]):
    """A kind of run; `execute` calls its methods in the order in which they stand here, each once.

    Args:
        options: The user's options.
        run: The folder of the run.
    """

    def __init__(self, options: O, run: RunFolder):
        self.options, self.run = options, run

    def opened(self) -> AbstractContextManager[object]:
        """Make the files that exist only while the run is executed."""
        return nullcontext()

    @abstractmethod
    def settings(self) -> S:
        """Resolve and check all settings that determine the result, before any work."""

    @abstractmethod
    def data(self, settings: S) -> Data:
        """Open the data."""

    @abstractmethod
    def model(self, settings: S) -> Any:
        """Make the model that learns, after `set_seed`."""

    @abstractmethod
    def trainer(self, model: Any, settings: S) -> RunTrainer[S]:
        """Make the trainer, which sets the seed again."""

    @abstractmethod
    def words(self, settings: S) -> Sequence[str]:
        """The command that reproduces the run, after `nystrom`."""

    def close(self) -> None:
        """Complete what a finished run leaves outside its folder."""


def execute(kind: Kind[Any, S], *, resume: bool, score: bool = True) -> RunTrainer[S] | None:
    """Start a run, or continue it, until it is finished.

    Args:
        score: Evaluate the best checkpoint and write the results, which finishes the run.

    Returns:
        The trainer after its last step; None if the run was finished before.

    Raises:
        ValueError: A setting, the data or the model cannot be used, or the folder holds something else.
        FloatingPointError: The loss or a weight is no longer finite.
        OSError: A file could not be written; the message names the folder and how to continue.
    """
    run, trainer = kind.run, None
    if kind.options.threads is not None:
        torch.set_num_threads(kind.options.threads)
    if is_main():
        run.check_free(resume=resume)
    with no_file_bars(), kind.opened():
        settings = kind.settings()
        with run.held(settings, resume=resume, main=is_main()):
            data = kind.data(settings)
            run.check_data(data.fingerprint)
            if not run.is_done(resume=resume):
                set_seed(settings.seed)
                model = kind.model(settings)
                if is_main():
                    run.start(settings, folder=data.folder, fingerprint=data.fingerprint)
                trainer = kind.trainer(model, settings)
                command = command_line(kind.words(settings), settings.processes)
                run_to_the_end(trainer, resume=resume, command=command, score=score)
            kind.close()
    return trainer


def leave() -> None:
    """Disconnect from the other processes, if any, once nothing else holds their group.

    The threads of gloo end with the group. One that still lives when the interpreter ends may abort the process, whose
    work is done (SIGABRT, "terminate called without an active exception"); torchrun would then start it again.

    The last reference to the group must be that of `torch.distributed`, which releases the GIL and then waits for the
    threads. A garbage-collected model does not release it, and deadlocks with a thread that waits for it.
    """
    if dist.is_initialized():
        # Models and trainers are parts of cycles.
        gc.collect()
        dist.destroy_process_group()


def leaving_the_group(work: Callable[P, R]) -> Callable[P, R]:
    """Wrap work so that the process disconnects afterwards, when the objects of the work are gone."""

    @functools.wraps(work)
    def done(*args: P.args, **kwargs: P.kwargs) -> R:
        result = work(*args, **kwargs)
        leave()
        return result

    return done
