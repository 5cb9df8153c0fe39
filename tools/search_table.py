"""Print the table of docs/sentence-transformers.md from rows of results/: errors, and passages that find their text.

python tools/search_table.py
"""

from pathlib import Path
from typing import NamedTuple

from nystrom_lab.measure.rows import read_rows
from nystrom_lab.report.table import Table, markdown_table

RESULTS = Path(__file__).resolve().parents[1] / "results"
LENGTH = 2048


class Error(NamedTuple):
    """The rows that hold an error: file, quantity, and a fact with its value."""

    file: str
    quantity: str
    fact: str
    value: str


def of_positions(positions: str) -> Error:
    """The error of near_far with these positions."""
    return Error("long-inputs-positions.csv", "relative error of the hidden states", "positions", positions)


def of_heads(model: str) -> Error:
    """The error of a model with exact heads."""
    return Error("heads-chosen.csv", "held-out hidden error, its own exact heads", "model", model)


# The name on the page, the error, and the models of the rows of found passages, in papers and in pages.
SHOWN = (
    ("first 512 tokens", None, "first 512 tokens", "first 512 tokens"),
    ("pieces of 512 tokens, the mean of their vectors", None, "windows of 512", "windows of 512"),
    ("exact attention, stretched", None, "exact-stretched", "exact-stretched"),
    ("`near_far`, stretched", of_positions("interpolate"), "near_far", "near_far"),
    ("`near_far`, stretched, four exact heads", of_heads("minilm-2048"), "", ""),
    ("exact attention, repeated", None, "exact-repeated", "exact-repeated"),
    ("`near_far`, repeated", of_positions("repeat"), "near_far-repeated", "near_far-repeat"),
    ("`near_far`, repeated, four exact heads", of_heads("minilm-2048-repeat"), "", ""),
    (
        "`near_far`, repeated, four exact heads, healed by 40 papers",
        Error("heal.csv", "held-out error after", "model", "planned-2048-repeat"),
        "",
        "",
    ),
)


def error_of(where: Error) -> str:
    """The error of near_far, or of a plan, in the last of its rows."""
    rows = [
        row
        for row in read_rows(RESULTS / where.file)
        if (row.quantity, row.n) == (where.quantity, LENGTH)
        and row.facts.get(where.fact) == where.value
        and row.method != "softmax"
    ]
    return f"{rows[-1].value:.3f}"


def main() -> None:
    """Print it as Markdown."""
    rows = read_rows(RESULTS / "heal.csv")
    found = {(row.study, row.method): row for row in rows if row.quantity == "passages found"}
    lines = []
    for name, error, *models in SHOWN:
        hits = (found.get(key) for key in zip(("search papers", "search pages"), models, strict=True))
        cells = ("" if row is None else f"{row.value:.0f} of {row.repeats}" for row in hits)
        lines.append([name, error_of(error) if error else "", *cells])
    print(markdown_table(Table("", ["read", "error", "papers found", "pages found"], lines)))


if __name__ == "__main__":
    main()
