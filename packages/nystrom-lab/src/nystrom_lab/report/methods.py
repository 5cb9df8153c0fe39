"""The attention methods, for the terminal and as a Markdown table."""

import textwrap
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from nystrom_lab.report.table import Table, markdown_table


def methods_text(methods: Mapping[str, Any], width: int) -> str:
    """The methods of the registry as text, one block each, wrapped to `width` where possible."""
    blocks = []
    for name, method in methods.items():
        can, cannot = (", ".join(names) or "nothing of these" for names in method.abilities())
        facts = {
            "what it is": method.summary,
            "options": ", ".join(f"{each.name}={each.default!r}" for each in fields(method.options)) or "none",
            "time": method.cost,
            "exact limit": method.exact_limit,
            "can": can,
            "cannot": cannot,
            "source": method.source,
        }
        wrap = textwrap.TextWrapper(width, subsequent_indent=" " * 15, break_long_words=False, break_on_hyphens=False)
        lines = [name]
        for what, text in facts.items():
            wrap.initial_indent = f"  {what:11}  "
            lines.append(wrap.fill(text))
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def methods_markdown(methods: Mapping[str, Any]) -> str:
    """The methods as a Markdown table, without their options."""
    heads = ("name", "what it is", "time", "exact limit", "source")
    cells = [(f"`{name}`", each.summary, each.cost, each.exact_limit, each.source) for name, each in methods.items()]
    return markdown_table(Table("", heads, cells, left=len(heads)))
