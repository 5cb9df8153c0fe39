"""A table of text, and its two writers: for the terminal and as Markdown."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from nystrom.printable import printable

if TYPE_CHECKING:
    from rich.console import Console

# Beyond any line of a table.
_WIDE = 10_000


class Table(NamedTuple):
    """A table of text.

    Attributes:
        title: Title; "" for none.
        heads: Heads of the columns.
        lines: Cells of each line; on the terminal a line with a single cell is a heading for those below, and a line
            whose first cell begins with a blank is dimmed.
        left: Number of leading columns that hold words; all others hold numbers.
        notes: Below the table.
    """

    title: str
    heads: Sequence[str]
    lines: Sequence[Sequence[str]]
    left: int = 1
    notes: str = ""


def markdown_table(table: Table) -> str:
    """Write a table as Markdown, its title above it, without its notes.

    Raises:
        ValueError: A line with another number of cells than there are columns.
    """
    _, heads, lines, left, _ = table
    text = [f"{table.title}:\n"] if table.title else []
    text += [_line(heads), "|" + "---|" * left + "---:|" * (len(heads) - left)]
    for cells in lines:
        if len(cells) != len(heads):
            raise ValueError(f"a line has {len(cells)} cells; expected {len(heads)}: {', '.join(cells)}.")
        text.append(_line(cells))
    return "\n".join(text) + "\n"


def _line(cells: Sequence[str]) -> str:
    """One line; a bar inside a cell would begin another column."""
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def print_table(table: Table, console: "Console | None" = None) -> None:
    """Print a table without breaking words and numbers: on a narrower terminal, lines are longer than it."""
    from rich import box
    from rich.console import Console
    from rich.markup import escape as unmarked
    from rich.table import Table as Shown

    def escape(text: str) -> str:
        return unmarked(printable(text))

    # On a stream that escapes control characters, the styles are drawn around it.
    to = Console(file=getattr(sys.stdout, "styled", None)) if console is None else console
    title, notes = (escape(text) or None for text in (table.title, table.notes))
    shown = Shown(box=box.SIMPLE_HEAD, title=title, caption=notes, caption_justify="left", padding=(0, 1, 0, 0))
    shown.pad_edge = shown.show_edge = False
    for place, head in enumerate(table.heads):
        words = place < table.left
        # A single column of names is as wide as they are; numbers go below each other on a narrow terminal.
        once = words and table.left == 1
        shown.add_column(escape(head), justify="left" if words else "right", overflow="fold", no_wrap=once)
    for cells in table.lines:
        if len(cells) == 1:
            shown.add_section()
        style = "bold" if len(cells) == 1 else "dim" if cells[0].startswith(" ") else ""
        first = f"[{style}]{escape(cells[0])}[/{style}]" if style else escape(cells[0])
        shown.add_row(first, *map(escape, cells[1:]))
    # Cells are measured in a wide console, as rich measures no cell wider than the console.
    wide = to.options.update(width=_WIDE)
    cells = [[to.measure(cell, options=wide) for cell in (each.header, *each.cells)] for each in shown.columns]
    widths = [max(cell.maximum for cell in column) for column in cells]
    # A column whose lines are not wrapped needs its longest line, any other its longest word.
    spare = [
        0 if column.no_wrap else width - max(cell.minimum for cell in measured)
        for column, width, measured in zip(shown.columns, widths, cells, strict=True)
    ]
    # A column's padding and the divider to the next column are a character each; the last column has neither.
    between, before = 2 * len(widths) - 2, to.width
    while sum(widths) + between > before and any(spare):
        widest = max((width, place) for place, width in enumerate(widths) if spare[place])[1]
        widths[widest] -= 1
        spare[widest] -= 1
    for column, width in zip(shown.columns, widths, strict=True):
        column.width = width
    to.width = max(before, sum(widths) + between)
    to.print(shown, crop=False)
    to.width = before
