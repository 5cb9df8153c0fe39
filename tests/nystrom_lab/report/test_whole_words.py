"""Tables keep words and numbers whole at any width of the terminal."""

import io

import pytest
from rich import box
from rich.console import Console
from rich.table import Table

from nystrom_lab.cli.main import main
from nystrom_lab.measure.rows import append_rows, new_row
from nystrom_lab.report.fillings import print_fillings
from nystrom_lab.report.whole_words import print_table


def filled():
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True, overflow="fold")
    for head in ("listops", "pathfinder"):
        table.add_column(head, justify="right", overflow="fold")
    table.add_row("nystrom-64 with skip", "37.1 ± 0.5 (3; 1.1)", "70.2")
    return table


@pytest.mark.parametrize("width", [1, 10, 40])
def test_a_narrow_terminal_cuts_no_word(width):
    out = io.StringIO()
    console = Console(file=out, width=width)
    print_table(filled(), console)
    printed = out.getvalue()
    assert {"listops", "pathfinder", "37.1", "0.5", "70.2"} <= {*printed.replace("(", " ").split()}
    assert "nystrom-64 with skip" in printed
    assert console.width == width


def test_a_wide_terminal_is_as_it_was():
    printed = []
    for show in (print_table, lambda table, console: console.print(table)):
        out = io.StringIO()
        show(filled(), Console(file=out, width=120))
        printed.append(out.getvalue())
    assert printed[0] == printed[1]


@pytest.mark.parametrize("columns", ["8", "40"])
@pytest.mark.parametrize("command", [["lra", "table"], ["report", "training"]])
def test_commands_print_whole_numbers(command, columns, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", columns)
    rows = {
        "lra": new_row(study="train listops", quantity="test accuracy", method="softmax", value=0.371, unit="",
                       repeats=2000, facts={"layers": 2, "preset": "demo"}, seed=0, device="cpu"),
        "report": new_row(study="training", quantity="step time", method="softmax", value=371.5, unit="ms", n=2000,
                          facts={"task": "listops"}, device="cpu", low=370.0, high=372.0),
    }  # fmt: skip
    append_rows(tmp_path / "rows.csv", [rows[command[0]]])
    assert main([*command, str(tmp_path / "rows.csv")]) == 0
    printed = capsys.readouterr().out.split()
    assert any("listops" in word for word in printed)
    assert any(word.startswith("softmax") for word in printed)
    assert any(word.startswith("37") for word in printed)


def test_fillings_are_whole(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "9")
    print_fillings(
        [{"line": 1, "mask": 1, "rank": 1, "token": "mountains", "probability": 0.5, "text": "the mountains"}]
    )
    printed = capsys.readouterr().out.split()
    assert printed.count("mountains") == 2
    assert "50.00%" in printed
