"""The files in results/ can be read, and every curve belongs to a run whose rows record the command."""

import csv
from pathlib import Path

import pytest

from nystrom_lab.measure.rows import read_rows
from nystrom_papers.report.lra.curves import GATHERED

RESULTS = Path(__file__).parents[4] / "results"
CURVES = sorted(RESULTS.glob("lra-*-curves.csv"))
COMMANDS = ("nystrom ", "torchrun ", "python tools/", "python -m tools.")
ROWS = sorted(set(RESULTS.rglob("*.csv")) - set(RESULTS.glob("*-curves.csv")))


@pytest.mark.parametrize("path", ROWS, ids=lambda path: path.stem)
def test_every_row_says_what_measured_it_and_on_what(path):
    for row in read_rows(path):
        assert row.command.startswith(COMMANDS), row
        assert all((row.device, row.torch, row.commit, row.date)), row


@pytest.mark.parametrize("path", CURVES, ids=lambda path: path.stem)
def test_every_curve_is_of_a_run_whose_rows_are_there(path):
    with path.open(newline="") as file:
        header, *lines = csv.reader(file)
    assert tuple(header) == GATHERED
    runs = [line[0] for line in lines]
    assert runs == sorted(runs), "the order in which --gather writes them"
    commands = [row.command for file in ROWS if file.name.startswith("lra-") for row in read_rows(file)]
    for run in {run.removesuffix("-4000") for run in runs}:
        assert any(f"/{run} " in f"{command} " for command in commands), run


def test_the_page_names_every_file():
    page = (RESULTS / "README.md").read_text(encoding="utf-8")
    assert [path.name for path in RESULTS.glob("*.csv") if path.name not in page] == []
