"""Print a table of the arena to the terminal, with no number cut."""

from collections.abc import Iterable, Sequence
from textwrap import fill

from nystrom_lab.report.whole_words import print_table as print_whole

_LABEL = 20


def print_table(title: str, tasks: Sequence[str], lines: Iterable[tuple[str, Sequence[str]]], notes: str) -> None:
    """Print a table whose first column names the lines; names break between words, and never take a number's room.

    Args:
        title: What the cells are.
        tasks: Heads of the columns after the first.
        lines: Name and cells of each; an indented name, of what a paper prints, is dimmed.
        notes: Below the table.
    """
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, title=title, caption=escape(notes), caption_justify="left", padding=(0, 1, 0, 0))
    table.pad_edge = table.show_edge = False
    table.add_column("", no_wrap=True, overflow="fold")
    for task in tasks:
        table.add_column(task, justify="right", overflow="fold")
    for name, cells in lines:
        label = escape(fill(name, _LABEL, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False))
        table.add_row(f"[dim]{label}[/dim]" if name.startswith(" ") else label, *cells)
    print_whole(table)
