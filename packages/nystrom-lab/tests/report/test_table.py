import io

import pytest
from rich.console import Console

from nystrom_lab.cli.main import main
from nystrom_lab.measure.rows import Row, append_rows
from nystrom_lab.report.table import Table, markdown_table, print_table

LINES = [["forward [ms]"], ["nystrom-64 with skip", "37.1 ± 0.5 (3; 1.1)", "70.2"], ["  printed", "1", "2"]]
FILLED = Table("accuracy", ["", "listops", "pathfinder"], LINES, notes="of three seeds")


def printed(table, width):
    out = io.StringIO()
    console = Console(file=out, width=width)
    print_table(table, console)
    assert console.width == width
    return out.getvalue()


def test_a_table_has_a_head_a_rule_and_its_lines():
    assert markdown_table(Table("", ("method", "ms"), [("softmax", "3"), ("nystrom", "1")])) == (
        "| method | ms |\n|---|---:|\n| softmax | 3 |\n| nystrom | 1 |\n"
    )
    assert markdown_table(Table("ms", ("a", "b"), [], left=2)) == "ms:\n\n| a | b |\n|---|---|\n"


def test_a_bar_inside_a_cell_begins_no_column():
    assert r"| \|\|q\|\| | 1 |" in markdown_table(Table("", ("norm", "value"), [("||q||", "1")]))


def test_a_line_of_another_length_raises():
    with pytest.raises(ValueError, match="a line has 1 cells; expected 2"):
        markdown_table(Table("", ("a", "b"), [("x",)]))


def test_no_terminal_is_too_narrow_for_a_word_or_a_number():
    heads = ["", "listops", "text", "retrieval", "image", "pathfinder", "mean"]
    numbers = ["37.10", "65.02", "79.35", "38.20", "74.16", "58.77"]
    table = Table("accuracy", heads, [["softmax, demo", *["35.1 (1; 1.1)"] * 5, "–"], ["  Nyströmformer", *numbers]])
    for width in range(1, 120):
        text = printed(table, width)
        assert {*numbers, *heads[1:], "35.1", "(1;", "1.1)"} <= {*text.split()}, width
        assert "softmax, demo" in text, width
    assert {"seeds", "[ms]", "nystrom-64"} <= {*printed(FILLED, 1).split()}


def test_a_wide_terminal_has_a_line_for_each():
    title, heads, _, heading, line, other, notes = printed(FILLED, 100).splitlines()
    assert (title.strip(), heads.split(), notes.strip()) == ("accuracy", ["listops", "pathfinder"], "of three seeds")
    assert (heading.strip(), other.split()) == ("forward [ms]", ["printed", "1", "2"])
    assert line.split() == ["nystrom-64", "with", "skip", "37.1", "±", "0.5", "(3;", "1.1)", "70.2"]


def test_words_are_to_the_left_and_numbers_to_the_right():
    table = Table("", ["task", "attention", "ms"], [["a", "bb", "1"], ["aaaa", "b", "100"]], left=2)
    assert [line.rstrip() for line in printed(table, 80).splitlines()[2:]] == [
        "a     bb           1",
        "aaaa  b          100",
    ]


@pytest.mark.parametrize("columns", ["8", "40"])
@pytest.mark.parametrize("command", [["lra", "table"], ["report", "training"]])
def test_commands_print_whole_numbers(command, columns, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", columns)
    rows = {
        "lra": Row(study="train listops", quantity="test accuracy", method="softmax", value=0.371, unit="",
                       repeats=2000, facts={"layers": 2, "preset": "demo"}, seed=0, device="cpu"),
        "report": Row(study="training", quantity="step time", method="softmax", value=371.5, unit="ms", n=2000,
                          facts={"task": "listops"}, device="cpu", low=370.0, high=372.0),
    }  # fmt: skip
    append_rows(tmp_path / "rows.csv", [rows[command[0]]])
    assert main([*command, str(tmp_path / "rows.csv")]) == 0
    printed = capsys.readouterr().out.split()
    assert any("listops" in word for word in printed)
    assert any(word.startswith("softmax") for word in printed)
    assert any(word.startswith("37") for word in printed)
