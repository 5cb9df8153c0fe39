"""Words for masks, on the terminal."""

from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

from nystrom_lab.report.whole_words import print_table


def print_fillings(fillings: Iterable[Mapping[str, Any]]) -> None:
    """Print a table per mask, as the words come.

    Args:
        fillings: Fields of `nystrom.models.fill_mask.Filling`, by line, mask and rank.
    """
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    for (line, mask), words in groupby(fillings, key=lambda filling: (filling["line"], filling["mask"])):
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=f"line {line}, mask {mask}", title_justify="left")
        table.add_column("", justify="right")
        table.add_column("word")
        table.add_column("probability", justify="right")
        table.add_column("text")
        for word in words:
            chance = f"{word['probability']:.2%}"
            table.add_row(str(word["rank"]), escape(word["token"]), chance, escape(word["text"]))
        print_table(table)
