import pytest

from nystrom_lab.report.markdown import markdown_table


def test_a_table_has_a_head_a_rule_and_its_lines():
    assert markdown_table(("method", "ms"), [("softmax", "3"), ("nystrom", "1")]) == (
        "| method | ms |\n|---|---:|\n| softmax | 3 |\n| nystrom | 1 |\n"
    )
    assert "|---|---|" in markdown_table(("a", "b"), [], left=2)


def test_a_bar_inside_a_cell_begins_no_column():
    assert r"| \|\|q\|\| | 1 |" in markdown_table(("norm", "value"), [("||q||", "1")])


def test_a_line_of_another_length_raises():
    with pytest.raises(ValueError, match="a line has 1 cells; expected 2"):
        markdown_table(("a", "b"), [("x",)])
