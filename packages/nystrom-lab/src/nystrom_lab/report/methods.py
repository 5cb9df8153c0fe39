"""The attention methods, for the terminal and as a Markdown table."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from nystrom_lab.report.table import Table, markdown_table


@dataclass(frozen=True)
class MethodLine:
    """The description of one method.

    Attributes:
        name: Its name in the registry.
        summary: What it is.
        cost: Time, in the letters n, s (tokens), m (landmarks or features), d (width of a head).
        exact_limit: When it equals what it approximates.
        source: Paper.
        options: Its options with their defaults.
        can: Capabilities that not all methods have.
        cannot: Unsupported capabilities, which raise.
    """

    name: str
    summary: str
    cost: str
    exact_limit: str
    source: str
    options: str
    can: str
    cannot: str


def methods_text(lines: Sequence[MethodLine], width: int) -> str:
    """The methods as text, one block each, wrapped to `width` where possible."""
    blocks = []
    for line in lines:
        facts = {
            "what it is": line.summary,
            "options": line.options,
            "time": line.cost,
            "exact limit": line.exact_limit,
            "can": line.can,
            "cannot": line.cannot,
            "source": line.source,
        }
        blocks.append("\n".join([line.name, *(_fact(name, text, width) for name, text in facts.items())]))
    return "\n\n".join(blocks)


def _fact(name: str, text: str, width: int) -> str:
    return textwrap.fill(
        text,
        width=width,
        initial_indent=f"  {name:11}  ",
        subsequent_indent=" " * 15,
        break_long_words=False,
        break_on_hyphens=False,
    )


def methods_markdown(lines: Sequence[MethodLine]) -> str:
    """The methods as a Markdown table, without their options."""
    heads = ("name", "what it is", "time", "exact limit", "source")
    cells = [(f"`{line.name}`", line.summary, line.cost, line.exact_limit, line.source) for line in lines]
    return markdown_table(Table("", heads, cells, left=len(heads)))
