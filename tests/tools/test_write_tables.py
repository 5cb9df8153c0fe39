import re

import pytest

from nystrom_lab.measure.rows import Row, append_rows
from tools.write_tables import LAWS, ROOT, commands, laws, main, pages, written


def test_the_pages_say_what_the_rows_say(capsys):
    assert main(["--check"]) == 0, capsys.readouterr().err
    assert sum(len(commands(page.read_text(encoding="utf-8"))) for page in pages(ROOT)) > 0


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "efficiency.csv"
    rows = [
        Row(study="efficiency", quantity=quantity, method="linear", value=2.0, unit=unit, n=8, device="a CPU")
        for quantity, unit in (("forward time", "ms"), ("forward memory", "MB"))
    ]
    append_rows(path, rows)
    return path


def test_a_table_is_replaced_and_the_rest_stays(file):
    begin = f"<!-- nystrom report efficiency {file} --markdown --only 'forward time' -->"
    page = f"before\n\n{begin}\nold\n<!-- end -->\nafter\n"
    new = written(page)
    assert new.startswith(f"before\n\n{begin}\n\n| forward time (ms) | n = 8 |\n")
    assert new.endswith("\n\n<!-- end -->\nafter\n")
    assert "| linear | 2.00 (1.0×) |" in new
    assert "memory" not in new
    assert "old" not in new
    assert written(new) == new


def test_the_tests_of_a_law_are_listed_by_their_mark():
    second = "@pytest.mark.law(2)\n@few\n@given(\n    n=1\n)\ndef test_b():\n"
    source = f"{second}\n\n@pytest.mark.law(1)\ndef test_a():\n\n\ndef test_c():\n"
    assert laws(source) == "\n- Law 1: `test_a`.\n- Law 2: `test_b`.\n\n"
    page = written("<!-- laws -->\n<!-- end -->\n")
    assert all(f"- Law {law}: `test_" in page for law in range(1, 10))
    without = {
        *("test_every_method_has_its_variants", "test_the_module_is_the_function"),
        "test_outputs_and_gradients_are_those_of_the_reference",
    }
    suite = re.findall(r"^def (test_\w+)", LAWS.read_text(encoding="utf-8"), re.MULTILINE)
    assert {*re.findall(r"`(test_\w+)`", page), *without} == {*suite}


def test_memory_alone_is_of_one_call(file):
    page = f"<!-- nystrom report efficiency {file} --markdown --only 'forward memory' -->\n<!-- end -->\n"
    assert "- Peak of one of the calls; in brackets" in written(page)


@pytest.mark.parametrize(
    ("page", "wanted"),
    [
        ("<!-- nystrom methods -->\n", "1 tables begin and 0 end"),
        ("<!-- python tools/first_page.py -->\n", "1 tables begin and 0 end"),
        ("<!-- python tools/first_page.py --rows 3 -->\n<!-- end -->\n", "first_page.py --rows 3 ended with 2"),
        ("<!-- nystrom report efficiency none.csv -->\n<!-- end -->\n", "ended with 2: .*none.csv"),
        ("<!-- nystrom report efficiency FILE --only speed -->\n<!-- end -->\n", "ended with 2: .*'speed'"),
    ],
)
def test_a_table_that_cannot_be_written_raises(page, wanted, file):
    with pytest.raises(ValueError, match=wanted):
        written(page.replace("FILE", str(file)))
