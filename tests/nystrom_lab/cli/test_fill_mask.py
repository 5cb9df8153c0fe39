"""Words for masks on the command line: tables and JSON, many lines in little memory, one line for a mistake."""

import io
import json
import os
import subprocess
import sys

import pytest

from nystrom.models.fill_mask import fill_mask
from nystrom_lab.cli.main import main

LINE = "Paris is the [MASK] of France."


def run(capsys, *words):
    code = main(["fill-mask", *map(str, words), "--device", "cpu"])
    return code, *capsys.readouterr()


def test_the_command_prints_a_table_and_json(mask_filler, capsys):
    code, out, err = run(capsys, LINE, "--model", mask_filler, "--top-k", 3)
    expected = fill_mask(LINE, model=mask_filler, top_k=3, device="cpu")
    assert (code, err) == (0, "")
    assert all(f"{x.probability:.2%}" in out for x in expected)
    code, out, _ = run(capsys, LINE, "--model", mask_filler, "--top-k", 3, "--json")
    assert [json.loads(line)["token_id"] for line in out.splitlines()] == [x.token_id for x in expected]


def test_the_command_reads_a_file_and_standard_input(mask_filler, capsys, tmp_path, monkeypatch):
    text = f"{LINE}\n\nBerlin [MASK]\n"
    (tmp_path / "lines.txt").write_text(text)
    code, by_file, _ = run(
        capsys, "--file", tmp_path / "lines.txt", "--model", mask_filler, "--json", "--batch-size", 2
    )
    assert code == 0
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    code, by_input, _ = run(capsys, "--file", "-", "--model", mask_filler, "--json", "--batch-size", 2)
    assert code == 0
    assert by_input == by_file
    assert [json.loads(line)["line"] for line in by_file.splitlines()] == [1] * 5 + [3] * 5


def test_the_bar_goes_to_stderr_and_only_for_lines_of_a_file(mask_filler, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setattr("nystrom.progress._BAR", 0)
    (tmp_path / "lines.txt").write_text(f"{LINE}\n" * 3)
    code, out, err = run(capsys, "--file", tmp_path / "lines.txt", "--model", mask_filler, "--json")
    assert code == 0
    assert "/3" in err
    assert "/3 " not in out
    assert "/1" not in run(capsys, LINE, "--model", mask_filler)[2]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "takes either a text or --file"),
        ([LINE, "--file", "-"], "takes either a text or --file"),
        (["--file", "nowhere.txt"], "file is nowhere.txt, which is not a file"),
        (["no mask"], "line 1 holds no [MASK]: 'no mask'"),
        ([LINE, "--top-k", "0"], "top_k is 0"),
    ],
)
def test_a_mistake_ends_with_one_line_and_code_2(mask_filler, capsys, words, says):
    code, out, err = run(capsys, *words, "--model", mask_filler)
    assert (code, out) == (2, "")
    assert says in err
    assert err.count("\n") == 1


def test_a_line_without_a_mask_stops_a_file_before_the_first_answer(mask_filler, capsys, tmp_path):
    (tmp_path / "lines.txt").write_text(f"{LINE}\nno mask\n")
    code, out, err = run(capsys, "--file", tmp_path / "lines.txt", "--model", mask_filler)
    assert (code, out) == (2, "")
    assert "line 2 holds no [MASK]: 'no mask'" in err


def test_a_file_that_is_no_text_is_refused(mask_filler, capsys, tmp_path):
    (tmp_path / "lines.txt").write_bytes(b"\xff\xfe[MASK]")
    code, _, err = run(capsys, "--file", tmp_path / "lines.txt", "--model", mask_filler)
    assert code == 2
    assert "lines.txt is not UTF-8 text" in err


@pytest.mark.slow
def test_memory_does_not_grow_with_the_lines(mask_filler, tmp_path):
    peaks = []
    for count in (2_000, 20_000):
        (tmp_path / "lines.txt").write_text(f"{LINE}\n" * count)
        code = (
            "import resource, sys; from nystrom_lab.cli.main import main; main(sys.argv[1:]);"
            "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)"
        )
        words = [
            "fill-mask",
            "--file",
            str(tmp_path / "lines.txt"),
            "--model",
            str(mask_filler),
            "--json",
            "--device",
            "cpu",
        ]
        done = subprocess.run(
            [sys.executable, "-c", code, *words], capture_output=True, text=True, check=True, env=os.environ
        )
        peaks.append(int(done.stderr.split()[-1]))
    # In KiB; the interpreter's own heap varies by a few MiB.
    assert peaks[1] < peaks[0] + 20 * 1024
