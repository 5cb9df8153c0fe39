"""The table of attention methods, for the terminal and as Markdown."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class MethodLine:
    """What the table says of one method.

    Attributes:
        name: Its name in the registry.
        summary: What it is.
        cost: Time, in the letters n, s (tokens), m (landmarks or features), d (width of a head).
        exact_limit: When it equals what it approximates.
        source: Paper.
        options: Its options with their defaults.
    """

    name: str
    summary: str
    cost: str
    exact_limit: str
    source: str
    options: str


def print_methods(lines: Sequence[MethodLine]) -> None:
    """Print the methods, the options of each below it."""
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("method", "what it is; its options", "time", "exact limit", "source"):
        table.add_column(title, no_wrap=title in ("method", "time"))
    for line in lines:
        described = f"{escape(line.summary)}\n[dim]{escape(line.options)}[/dim]"
        table.add_row(line.name, described, escape(line.cost), escape(line.exact_limit), escape(line.source))
    Console().print(table)


def methods_markdown(lines: Sequence[MethodLine]) -> str:
    """The methods as a Markdown table, without their options."""
    text = ["| name | what it is | time | exact limit | source |", "|---|---|---|---|---|"]
    text += [f"| `{x.name}` | {x.summary} | {x.cost} | {x.exact_limit} | {x.source} |" for x in lines]
    return "\n".join(text)
