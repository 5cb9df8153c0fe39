"""The command line that reproduces a single run: for the rows of the run, and for its process in a grid."""

from pathlib import Path

from nystrom_lab.data.lra.facts import LRA
from nystrom_lab.training.data.columns import NO_COLUMNS, Columns
from nystrom_lab.training.run_settings import Settings

# What is asked for by the name alone.
_FLAGS = ("compile", "track_error")


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
        data: Its data, as the user named them.
        columns: Where the user's own files hold texts and labels.
        to: Its folder.
        threads: Threads on the CPU; None for torch's choice.
    """
    named: dict[str, object] = {"attention": settings.attention, "preset": settings.preset, "seed": settings.seed}
    named |= settings.changes()
    if settings.accumulation != 1:
        named["accumulation"] = settings.accumulation
    if settings.context_parallel != 1:
        named["context_parallel"] = settings.context_parallel
    named |= {"precision": settings.precision, "device": settings.device}
    named |= {"threads": threads, "compile": settings.compile or None}
    named |= {"track_error": settings.track_error or None, "data": data}
    named |= {**columns.named(), "to": to}
    named |= {"model": settings.model, "mask_share": settings.mask_share or None}
    if settings.positions is not None and not LRA[settings.task].any_size:
        named["max_length"] = settings.positions
    words = ["pretrain" if settings.mask_share else "train", settings.task]
    for name, value in named.items():
        flag = f"--{name.replace('_', '-')}"
        if name in _FLAGS and value:
            words.append(flag)
        elif isinstance(value, tuple):
            words += [flag, *map(str, value)]
        elif value is not None or name.startswith("options."):
            words += [flag, str(value)]
    return words
