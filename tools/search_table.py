"""Print the table of docs/sentence-transformers.md from rows of results/: errors, and passages that find their text.

python tools/search_table.py
"""

from pathlib import Path

from nystrom_lab.measure.rows import Row, read_rows
from nystrom_lab.report.table import Table, markdown_table

RESULTS = Path(__file__).resolve().parents[1] / "results"
ERROR = "relative error of the hidden states"
# The name on the page, the positions whose error is known, and the models of the rows, of papers and of pages.
SHOWN = (
    ("first 512 tokens", "", "first 512 tokens", "first 512 tokens"),
    ("pieces of 512 tokens, the mean of their vectors", "", "windows of 512", "windows of 512"),
    ("exact attention, stretched", "", "exact-stretched", "exact-stretched"),
    ("`near_far`, stretched", "interpolate", "near_far", "near_far"),
    ("exact attention, repeated", "", "exact-repeated", "exact-repeated"),
    ("`near_far`, repeated", "repeat", "near_far-repeated", "near_far-repeat"),
)


def main() -> None:
    """Print it as Markdown."""
    errors = {
        row.fact("positions"): f"{row.value:.3f}"
        for row in read_rows(RESULTS / "long-inputs-positions.csv")
        if (row.quantity, row.method, row.n) == (ERROR, "near_far", 2048)
    }
    found: dict[tuple[str, str], Row] = {
        (row.study, row.method): row for row in read_rows(RESULTS / "heal.csv") if row.quantity == "passages found"
    }
    lines = []
    for name, positions, *models in SHOWN:
        rows = (
            found.get((study, model)) for study, model in zip(("search papers", "search pages"), models, strict=True)
        )
        cells = ("" if row is None else f"{row.value:.0f} of {row.repeats}" for row in rows)
        lines.append([name, errors.get(positions, ""), *cells])
    print(markdown_table(Table("", ["read", "error", "papers found", "pages found"], lines)))


if __name__ == "__main__":
    main()
