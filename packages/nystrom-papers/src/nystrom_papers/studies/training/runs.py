"""The trainings of a study: each is a run in a process of its own, which continues where it was interrupted.

The process is this module, which is given the engine's name and its arguments as JSON; see
`nystrom_lab.training.grid.child` for how it ends with its parent. A run is a folder of `nystrom pretrain` or `nystrom
finetune`, and its rows name that command. The runs lie beside the folders of the studies, so that
several studies can share them.
"""

import json
import shlex
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from nystrom_lab.measure.rows import read_rows
from nystrom_lab.training.grid.child import end_with_parent, exit_code
from nystrom_lab.training.run_folder import RunFolder
from nystrom_lab.training.trials import read_search

CHILD = (sys.executable, "-m", "nystrom_papers.studies.training.runs")


class Training(NamedTuple):
    """A training that a study needs.

    Attributes:
        name: Name of its folder.
        engine: The command.
        arguments: Fields of `nystrom_lab.config.PretrainOptions` or `FinetuneOptions`, as JSON values.
    """

    name: str
    engine: Literal["pretrain", "finetune"]
    arguments: Mapping[str, object]


def said(trainings: Sequence[Training]) -> dict[str, str]:
    """The arguments that all trainings share, then those of each that differ, without data and model."""
    kept = [{name: v for name, v in each.arguments.items() if name not in ("data", "model")} for each in trainings]
    shared = {name for name in kept[0] if all(name in each and each[name] == kept[0][name] for each in kept)}
    lines = {"training": _words({name: kept[0][name] for name in kept[0] if name in shared})}
    for training, arguments in zip(trainings, kept, strict=True):
        lines[training.name] = _words({name: value for name, value in arguments.items() if name not in shared})
    return lines


def _words(arguments: Mapping[str, object]) -> str:
    return " ".join(f"{name}={value}" for name, value in arguments.items())


def train(training: Training, folder: Path) -> RunFolder:
    """Start or continue a training until it is finished; a finished one is only checked.

    Raises:
        ValueError: The folder of the run holds a run with other settings.
        ChildProcessError: The training failed; it has printed why.
    """
    run = RunFolder(folder / training.name)
    _check(run, training)
    if run.is_finished:
        return run
    resume = run.is_started or read_search(run.path) is not None
    arguments = {**training.arguments, "to": str(run.path), "resume": resume, "threads": torch.get_num_threads()}
    print(f"{training.name}: {'goes on' if resume else 'starts'} in {run.path}", flush=True)
    process = subprocess.Popen([*CHILD, json.dumps([training.engine, arguments])], stdin=subprocess.PIPE)
    assert process.stdin is not None
    try:
        code = process.wait()
    finally:
        # Closing this pipe ends the child.
        process.stdin.close()
        process.wait()
    if code:
        raise ChildProcessError(
            f"{training.name} ended with exit code {code}, for the reason above; the same command continues it."
        )
    return run


def _check(run: RunFolder, training: Training) -> None:
    """Raise ValueError if the folder of a run, or of a search, holds one with other settings."""
    if run.is_started:
        settings = dict(run.read()["settings"])
    elif search := read_search(run.path):
        # The settings that the trials of a search share.
        trials = search["trials"]
        settings = {name: value for name, value in trials[0].items() if all(each[name] == value for each in trials)}
    else:
        return
    if run.is_finished and "epochs" in training.arguments:
        # Settings hold the steps that the epochs amount to; only the command names the epochs.
        words = shlex.split(next((row.command for row in read_rows(run.rows)), ""))
        settings["epochs"] = float(words[words.index("--epochs") + 1]) if "--epochs" in words else None
    for name, wanted in training.arguments.items():
        came = settings.get(name)
        if name not in settings or name == "model":
            continue
        if isinstance(wanted, Mapping) and isinstance(came, Mapping):
            came = {option: came.get(option) for option in wanted}
        if name == "conv_kernel_size" and wanted == 0:
            # 0 asks for no convolution, which a run records as None.
            wanted = None
        if came != wanted:
            raise ValueError(
                f"{run.path} holds a run with {name} = {came!r}, but the study needs {wanted!r}: choose another folder "
                "with --to."
            )


def main() -> int:
    """Train in this process, from the last checkpoint if there is one."""
    threading.Thread(target=end_with_parent, daemon=True).start()
    engine, arguments = json.loads(sys.argv[1])
    for name in ("data", "to", "model"):
        given = arguments.get(name)
        # The model of a fine-tuning may be a name on the Hub.
        if given is not None and (name != "model" or engine != "finetune"):
            arguments[name] = tuple(map(Path, given)) if isinstance(given, list) else Path(given)
    from nystrom_lab.config import FinetuneOptions, PretrainOptions
    from nystrom_lab.training.finetune.finetune import finetune
    from nystrom_lab.training.pretrain.pretrain import pretrain

    if engine == "pretrain":
        return exit_code(lambda: pretrain(PretrainOptions(**arguments)))
    return exit_code(lambda: finetune(FinetuneOptions(**arguments)))


if __name__ == "__main__":
    sys.exit(main())
