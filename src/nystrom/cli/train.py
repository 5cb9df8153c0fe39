"""Commands that train and score models: one, or a grid."""

import inspect
import sys
from dataclasses import field, fields, make_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from nystrom.cli.arguments import arguments_of, positional


def train_model(words: list[str]) -> None:
    """Train a model."""
    from nystrom.attention.registry import METHODS
    from nystrom.checks import check_names
    from nystrom.train.engine import train

    # The method decides which options there are, so its name is read before the rest.
    parameters = inspect.signature(train).parameters
    attention = word_after("--attention", words, parameters["attention"].default)
    check_names("attention method", [attention], METHODS)
    method = METHODS[attention].options
    optional: list[tuple[str, Any, Any]] = []
    for option in fields(method):
        kind: Any = option.type
        optional.append((option.name, kind | None, field(default=None)))
    chosen = make_dataclass("Options", optional)
    chosen.__doc__ = method.__doc__
    arguments = arguments_of(
        train,
        words,
        "train",
        task=positional(train, "task"),
        options=parameters["options"].replace(annotation=chosen, default=chosen()),
    )
    given = arguments.pop("options")
    arguments["options"] = {key: value for key, value in vars(given).items() if value is not None}
    train(**arguments)


def evaluate_model(words: list[str]) -> None:
    """Score a model."""
    from nystrom.train.engine import evaluate

    row = evaluate(**arguments_of(evaluate, words, "evaluate", task=positional(evaluate, "task")))
    spread = "" if row.low is None or row.high is None else f" ({row.low:.1%} to {row.high:.1%})"
    print(f"{row.quantity} {row.value:.1%}{spread}")


def lra_run(words: list[str]) -> None:
    """Train a grid of runs."""
    from nystrom.train.grid.plan import run_grid

    arguments = arguments_of(run_grid, words, "lra run")
    if failures := run_grid(**arguments):
        for failure in failures:
            print(f"nystrom: {failure.name} failed, {failure.reason}\n         log: {failure.log}", file=sys.stderr)
        raise SystemExit(1)
    print(f"nystrom lra table {arguments['to'] / 'lra.csv'} prints the accuracies.")


def lra_table(words: list[str]) -> None:
    """Print the accuracies of a grid."""
    from nystrom.measure.rows import read_rows
    from nystrom.report.lra.tables import lra_markdown, print_lra

    def table(files: tuple[Path, ...], *, markdown: bool = False) -> None:
        """Print the accuracies of runs beside those of the two papers.

        Args:
            files: Rows of `nystrom lra run` or `nystrom train`.
            markdown: As Markdown.
        """
        rows = [row for file in files for row in read_rows(file)]
        if markdown:
            print(lra_markdown(rows), end="")
        else:
            print_lra(rows)

    table(**arguments_of(table, words, "lra table", files=positional(table, "files")))


def lra_curves(words: list[str]) -> None:
    """Draw the accuracies of a grid."""
    from nystrom.report.lra.curves import draw_lra_curves, gather_curves

    def curves(source: Path, *, figure: Path, gather: Path | None = None) -> None:
        """Draw the validation accuracy of the runs of `nystrom lra run` over the time of training.

        Args:
            source: Folder of the runs, or a file that --gather wrote.
            figure: File to draw to, .png or .svg.
            gather: CSV file to write the curves of all runs in the folder to.
        """
        draw_lra_curves(source, figure)
        if gather is not None:
            gather_curves(source, gather)
        print(figure)

    curves(**arguments_of(curves, words, "lra curves", source=positional(curves, "source")))


def lra_overhead(words: list[str]) -> None:
    """Time a step beside one of a bare loop."""
    from nystrom.studies.speed.overhead import run_overhead

    for row in run_overhead(**arguments_of(run_overhead, words, "lra overhead")):
        print(f"{row.quantity:40} {row.value:9.3f} {row.unit:2} ({row.low:.3f} to {row.high:.3f})")


def word_after(flag: str, words: list[str], default: str) -> str:
    """The word that a command line gives for an option, before it is parsed."""
    for word, following in pairwise([*words, ""]):
        if word == flag and following:
            return following
        if word.startswith(f"{flag}="):
            return word.removeprefix(f"{flag}=")
    return default
