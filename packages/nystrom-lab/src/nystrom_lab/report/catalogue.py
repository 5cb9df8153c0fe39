"""The list of studies, for the terminal."""

import textwrap
from collections.abc import Sequence
from typing import NamedTuple


class StudyLine(NamedTuple):
    """The description of one study.

    Attributes:
        name: Its name.
        shows: What it shows.
        source: Its place in the papers.
        needs: Requirements of the small size; "" for none.
        paper_needs: Additional requirements of the paper's size.
        minutes: Minutes that the small size takes on one thread; "" if not measured.
        state: Whether it was run, and at which size.
    """

    name: str
    shows: str
    source: str
    needs: str
    paper_needs: str
    minutes: str
    state: str


def catalogue_text(lines: Sequence[StudyLine], width: int) -> str:
    """The studies as text, one block each, wrapped to `width` where possible."""
    return "\n".join(_block(line, width) for line in lines)


def _block(line: StudyLine, width: int) -> str:
    facts = [line.source]
    if line.needs or line.paper_needs:
        facts.append("; ".join(filter(None, (line.needs, line.paper_needs and f"--size paper: {line.paper_needs}"))))
    head = f"{line.name}: {line.shows}"
    state = f"{line.state}" + (f"; about {line.minutes} min on one thread" if line.minutes else "")
    return "\n".join(
        [
            textwrap.fill(head, width, subsequent_indent="    "),
            *(
                textwrap.fill(text, width, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)
                for text in (line.source, *(f"needs {fact}" for fact in facts[1:]), state)
            ),
            "",
        ]
    )
