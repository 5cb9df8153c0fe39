import re
from pathlib import Path

import pytest

from nystrom_lab.measure.rows import Row, read_rows
from tools.kernel_accounting.table import kernel_lines, kernel_notes, kernels_markdown, print_kernels

ROOT = Path(__file__).parents[3]
NUMBERS = {"launches": 1, "programs": 64, "registers": 255, "stack": 80, "shared memory": 66048, "bytes": 2.5e8}


def row(quantity, value, method="nystrom-triton-8+skip", **words):
    plain = {"study": "kernels", "unit": "", "device": "compiled, not run", "n": 1000, "m": 8, "dtype": "bfloat16"}
    plain |= {"facts": {"b": 2, "h": 5, "d": 10, "kernel": 33}, "command": "python -m tools.kernel_accounting count"}
    return Row(quantity=quantity, value=value, method=method, **plain | words)


def rows():
    found = []
    for timed in ("forward", "backward"):
        found += [row(f"{timed} means {what}", value) for what, value in NUMBERS.items()]
        found += [row(f"{timed} means passes", 2)]
        found += [row(f"{timed} torch launches", 3), row(f"{timed} torch bytes", 1e6)]
        found += [row(f"{timed} all launches", 4), row(f"{timed} all bytes", 2.51e8)]
        # Inputs and output: 4 x 2 x 5 x 10 x 1000 numbers of 2 bytes.
        found += [row(f"{timed} all memory", 8e4)]
        found += [row(f"{timed} all launches", 90, "nystrom-8+skip"), row(f"{timed} all bytes", 1e8, "floor")]
    return found


def test_a_line_has_each_number_of_a_kernel_in_its_unit():
    assert kernel_lines(rows(), "forward") == [
        ("means", ["1", "64", "255", "80", "64.5", "250.00", "2.00"]),
        ("operators of torch", ["3", "", "", "", "", "1.00", ""]),
    ]


def test_the_note_compares_with_the_torch_path_the_floor_and_the_inputs():
    assert kernel_notes(rows(), "backward") == (
        "backward: 4 launches, an operator of torch counted as one; 90 in nystrom-8+skip. "
        "251 MB, 2.51 times the floor of 100 MB. Extra memory 0.1 MB, 10.0 % of q, k, v and the output."
    )


def test_markdown_has_both_passes_and_the_command():
    text = kernels_markdown(rows())
    assert text.count("| means | 1 | 64 | 255 | 80 | 64.5 | 250.00 | 2.00 |") == 2
    assert "    python -m tools.kernel_accounting count\n" in text
    assert "compiled, not run" in text


def test_the_page_has_the_floors_of_the_rows_in_results():
    rows, page = read_rows(ROOT / "results" / "kernels.csv"), (ROOT / "docs" / "gpu-measured.md").read_text("utf-8")
    forward, backward = (
        re.search(r"([0-9.]+) times the floor", kernel_notes(rows, timed)) for timed in ("forward", "backward")
    )
    said = f"moves {forward[1]} times the bytes that every implementation must, a backward pass {backward[1]} times."
    assert said in " ".join(page.split())


def test_the_terminal_shows_all_columns_in_eighty_characters(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    print_kernels(rows())
    printed = capsys.readouterr().out
    assert "operators of torch" in printed
    assert all(word in printed for word in ("launches", "registers", "stack", "250.00", "64.5", "2.00"))
    assert "…" not in printed


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ([], "rows are of none; expected rows of the study 'kernels'"),
        ([row("forward time", 1.0, study="efficiency")], "rows are of 'efficiency'; expected"),
        ([row("forward means registers", 1.0), row("forward means registers", 1.0, "other")], "expected those of one"),
        (
            [row("forward means registers", 1.0), row("forward x y", 1.0, command="other")],
            "expected those of one command",
        ),
    ],
)
def test_other_rows_raise(wrong, message):
    with pytest.raises(ValueError, match=message):
        kernels_markdown(wrong)
