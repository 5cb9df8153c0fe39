"""Tables on the terminal, with every word and number whole: where the terminal is narrower, lines go beyond it."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


# Beyond any line of a table.
_WIDE = 10_000


def print_table(table: "Table", console: "Console | None" = None) -> None:
    """Print a table, at least as wide as its longest words need.

    Args:
        table: The table.
        console: Where to; None means standard output.
    """
    from rich.console import Console

    to = Console() if console is None else console
    # What is measured is never more than there is room for.
    wide = to.options.update(width=_WIDE)
    for column in table.columns:
        # A column whose lines are not wrapped needs its longest line.
        lines = [to.measure(cell, options=wide) for cell in (column.header, *column.cells)]
        column.min_width = max(line.maximum if column.no_wrap else line.minimum for line in lines)
    before, least = to.width, to.measure(table, options=wide).minimum
    # rich takes a column's padding off its words where a table has no more than its least width.
    to.width = before if least <= before else least + len(table.columns)
    to.print(table)
    to.width = before
