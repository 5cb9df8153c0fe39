"""Command lines of runs: for the rows of a run, and for its process in a grid."""

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nystrom.command_options import signature_of
from nystrom_lab.data.lra.facts import LRA
from nystrom_lab.training.data.columns import NO_COLUMNS, Columns
from nystrom_lab.training.run_settings import Settings


def command_line(words: Sequence[str], processes: int) -> str:
    """The command of these words after `nystrom`, without the machine's folders."""
    start = ["nystrom"] if processes == 1 else ["torchrun", "--nproc-per-node", str(processes), "-m", "nystrom_lab"]
    return shlex.join([*start, *(Path(word).name if os.path.isabs(word) else word for word in words)])


def option_words(named: Mapping[str, object]) -> list[str]:
    """Options as words: `--name value`, the name alone for True, several values for a tuple, nothing for None."""
    words: list[str] = []
    for name, value in named.items():
        if value is not None:
            words.append(f"--{name.replace('_', '-')}")
        if value is not None and value is not True:
            words += map(str, value) if isinstance(value, tuple) else [str(value)]
    return words


def asked_words(asked: Any, *, options: str = "options.") -> list[str]:
    """The non-default options of a command, as words, plus those that always affect the result.

    Args:
        asked: An instance of the command's options class; positional arguments are left out.
        options: Prefix of the options of the method.
    """
    named: dict[str, Any] = {}
    for name, parameter in signature_of(type(asked)).parameters.items():
        value = getattr(asked, name)
        flag = parameter.kind is parameter.KEYWORD_ONLY and name not in _WHERE
        if flag and (name in _ALWAYS or value != parameter.default):
            named[name] = value
    named |= {f"{options}{name}": value for name, value in (named.pop("options", None) or {}).items()}
    if (grid := named.pop("grid", None)) is not None:
        named |= {f"search.{name}": values for name, values in grid.values().items()}
    return option_words(named)


# What a command that reproduces a run says even where it is the default, which another version may change.
_ALWAYS = ("preset", "seed", "batch_size", "learning_rate", "device", "precision")
# Of where and when it runs.
_WHERE = ("resume", "jobs", "on", "slurm")


def train_words(
    settings: Settings,
    *,
    data: Path | str,
    columns: Columns = NO_COLUMNS,
    to: Path | str,
    threads: int | None = None,
) -> list[str]:
    """The words after `nystrom` that start a run with these settings.

    Args:
        settings: Settings of the run.
        data: Its data, as given by the user.
        columns: Columns of texts and labels in the user's own files.
        to: Its folder.
        threads: CPU threads; None for torch's choice.
    """
    named: dict[str, object] = {"attention": settings.attention, "preset": settings.preset, "seed": settings.seed}
    # What a preset has takes its value written out, be it True or, of a method's option, None.
    for name, value in settings.changes().items():
        if value is not None or name.startswith("options."):
            named[name] = value if isinstance(value, tuple) else str(value)
    if settings.accumulation != 1:
        named["accumulation"] = settings.accumulation
    if settings.context_parallel != 1:
        named["context_parallel"] = settings.context_parallel
    named |= {"precision": settings.precision, "device": settings.device}
    named |= {"threads": threads, "compile": settings.compile or None}
    named |= {"data": data, **columns.named(), "to": to}
    named |= {"model": settings.model, "mask_share": settings.mask_share or None}
    if settings.positions is not None and not LRA[settings.task].any_size:
        named["max_length"] = settings.positions
    return ["pretrain" if settings.mask_share else "train", settings.task, *option_words(named)]
