"""Count what the Triton kernels use of a GPU, without one: `python -m tools.kernel_accounting count --help`."""

import sys
from pathlib import Path
from typing import Annotated

import tyro

from nystrom_lab.measure.rows import read_rows
from tools.kernel_accounting.counting import count_kernels
from tools.kernel_accounting.table import kernels_markdown, print_kernels


def show(file: Annotated[Path, tyro.conf.Positional], *, markdown: bool = False) -> None:
    """Print the table of rows that were counted before.

    Args:
        file: Rows that the command count wrote.
        markdown: Print the table as Markdown.
    """
    rows = read_rows(file)
    if markdown:
        print(kernels_markdown(rows))
    else:
        print_kernels(rows)


def main() -> int:
    """Run a command; a mistake ends in one line and code 2."""
    try:
        rows = tyro.extras.subcommand_cli_from_dict(
            {"count": count_kernels, "show": show}, prog="python -m tools.kernel_accounting"
        )
    except ValueError as error:
        print(f"kernel_accounting: {error}", file=sys.stderr)
        return 2
    if rows is not None:
        print_kernels(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
