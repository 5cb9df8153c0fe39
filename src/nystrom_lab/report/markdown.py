"""A table in Markdown: the one writer of all tables of this library."""

from collections.abc import Iterable, Sequence


def markdown_table(heads: Sequence[str], lines: Iterable[Sequence[str]], *, left: int = 1) -> str:
    """Write a table.

    Args:
        heads: Heads of the columns.
        lines: Cells of each line.
        left: The first columns, as many as this, are aligned to the left, all others to the right.

    Raises:
        ValueError: A line with another number of cells than there are columns.
    """
    text = [_line(heads), "|" + "---|" * left + "---:|" * (len(heads) - left)]
    for cells in lines:
        if len(cells) != len(heads):
            raise ValueError(f"a line has {len(cells)} cells; expected {len(heads)}: {', '.join(cells)}.")
        text.append(_line(cells))
    return "\n".join(text) + "\n"


def _line(cells: Sequence[str]) -> str:
    """One line; a bar inside a cell would begin another column."""
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"
