import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nystrom_lab.cli.main import COMMANDS, FIRST, GROUPS, main
from nystrom_lab.measure.rows import append_rows, new_row


def run(*words, cwd=None):
    return subprocess.run([sys.executable, "-m", "nystrom_lab", *words], capture_output=True, text=True, cwd=cwd)


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
def test_the_first_screen_has_ten_commands_and_names_the_groups_of_all(words, capsys):
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert re.findall(r"^  (\S+(?: \S+)*)  ", printed, re.MULTILINE) == [f"{name}" for name in FIRST]
    assert len(FIRST) == 10
    assert all(f"nystrom {group} --help" in printed for group in GROUPS)
    assert max(map(len, printed.splitlines())) <= 100


def test_each_command_is_in_one_group(capsys):
    said = []
    for group in GROUPS:
        assert main([group, "--help"]) == 0
        said += re.findall(r"^  (\S+(?: \S+)*)  ", capsys.readouterr().out, re.MULTILINE)
    assert sorted(said) == sorted(COMMANDS)


def test_the_version_is_that_of_the_package(capsys):
    from nystrom import __version__

    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"nystrom {__version__}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data"], ""),
        (["trian", "listops"], "there is no command 'trian listops'. Perhaps you meant 'nystrom train'"),
        (["--verison"], "Perhaps you meant 'nystrom --version'"),
        (["bench", "eficiency"], "Perhaps you meant 'nystrom bench efficiency'"),
        (["bench", "x"], "there is no command 'bench x'. Commands of bench: 'bench efficiency', 'bench model', "),
        (
            ["lra", "run", "--tasks", "listops", "--methods", "nystrom", "--preset", "official"],
            "--preset is 'official'; expected one of 'demo', 'modern', 'modern-small', 'nystromformer', "
            "'nystromformer-1000', 'skyformer', 'skyformer-1000'. See nystrom lra run --help.",
        ),
        (["train", "listops", "--attention", "nystorm"], "attention method 'nystorm' is unknown"),
        (["train", "listops", "--attention=nystrom-8"], "option: --attention nystrom --options.num-landmarks 8."),
        (["finetune", "--attention", "near_far-8"], "option: --attention near_far --num-heavy 8 --num-clusters 8."),
        (["train", "listops", "--attention", "softmax-8"], "attention method 'softmax-8' is unknown"),
        (["bench", "efficiency", "--methods", "magic"], "method 'magic' is unknown"),
        (["bench", "efficiency", "--lengths", "0"], "an entry of lengths is 0"),
        (
            ["data", "prepare", "listops", "--to", "x", "--train", "-1"],
            "--train is -1; expected a whole number of at least 0",
        ),
    ],
)
def test_a_mistake_ends_with_one_line_and_code_2(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") <= 1
    assert not list(tmp_path.iterdir())


def test_the_home_folder_is_found_where_the_shell_leaves_its_sign(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for words in (["lra", "table", "~/none.csv"], ["lra", "curves", "~/none.csv", "--figure=~/x.png"]):
        assert main(words) == 2
        assert str(tmp_path / "none.csv") in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--help"], ["methods"]])
def test_a_reader_that_has_seen_enough_is_no_mistake(words):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "nystrom_lab", *words]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_options_belong_to_the_method_that_is_named(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--attention", "skyformer", "--help"])
    skyformer = capsys.readouterr().out
    assert "--options.gamma" in skyformer
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    assert "--options.gamma" not in capsys.readouterr().out


def test_methods_lists_the_registry(capsys):
    from nystrom.attention.registry import METHODS

    for words in (["methods"], ["methods", "--markdown"]):
        assert main(words) == 0
        printed = capsys.readouterr().out
        assert all(name in printed for name in METHODS)


def test_data_is_prepared_and_read_back_from_its_tsv(tmp_path):
    sizes = ["--train", "20", "--val", "5", "--test", "5", "--min-length", "5", "--max-length", "40"]
    made = run("data", "prepare", "listops", "--to", "made", *sizes, "--tsv", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    assert Path(made.stdout.strip()) == (tmp_path / "made").resolve()
    read = run("data", "prepare", "listops", "--from", "made", "--to", "read", cwd=tmp_path)
    assert read.returncode == 0, read.stderr
    assert "basic_train.tsv" in {path.name for path in (tmp_path / "made").iterdir()}


@pytest.mark.parametrize(
    ("study", "says"),
    [
        ("training", "expected 'efficiency': try nystrom report training"),
        ("near-far", "rows.csv --study near-far.\n"),
        ("overhead", "expected 'efficiency'.\n"),
    ],
)
def test_rows_of_another_study_are_sent_to_the_command_that_prints_them(study, says, tmp_path, capsys):
    append_rows(
        tmp_path / "rows.csv",
        [new_row(study=study, quantity="time", method="nystrom", value=1.0, unit="s", device="cpu")],
    )
    assert main(["report", "efficiency", str(tmp_path / "rows.csv")]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("words", [["report", "efficiency"], ["lra", "table"], ["lra", "curves", "--figure=x.png"]])
@pytest.mark.parametrize("content", [b"a\rb\n", b"\x00\xff\r\x00\n", b"\r", bytes(range(256))])
def test_a_file_of_another_kind_ends_in_one_line_that_names_it(words, content, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "picture.csv").write_bytes(content)
    assert main([*words, "picture.csv"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("nystrom: picture.csv, line 1 is ")


def test_runs_of_two_devices_in_one_file_have_a_table_each(tmp_path, capsys):
    facts = {"preset": "demo"}
    append_rows(
        tmp_path / "rows.csv",
        [
            new_row(
                study="train text",
                quantity=name,
                method="nystrom",
                value=value,
                unit="",
                device=on,
                seed=0,
                facts=facts,
            )
            for on, hours in (("an AMD", 1.5), ("an Intel", 2.5))
            for name, value in (("training time", 3600 * hours), ("steps", 500))
        ],
    )
    words = ["lra", "table", str(tmp_path / "rows.csv"), "--time"]
    for part, hours in (("AMD", "1.50"), ("Intel", "2.50")):
        assert main([*words, "--device", part]) == 0
        assert hours in capsys.readouterr().out
    assert main([*words, "--device", "GPU"]) == 2
    assert "expected a part of one of 'an AMD', 'an Intel'" in capsys.readouterr().err


@pytest.mark.parametrize("options", [[], ["--markdown"], ["--time"]])
def test_a_table_without_a_file_of_rows_says_that_one_is_missing(options, capsys):
    assert main(["lra", "table", *options]) == 2
    assert "no file of rows is named; expected those of `nystrom lra run`" in capsys.readouterr().err


@pytest.mark.long
def test_a_small_bench_leaves_rows_and_a_plot(tmp_path):
    done = run(
        *("bench", "efficiency", "--lengths", "128", "256", "--methods", "softmax", "nystrom-16", "--repeats", "1"),
        *("--heads", "1", "--width", "8", "--to", str(tmp_path / "run")),
    )
    assert done.returncode == 0, done.stderr
    assert "nystrom-16" in done.stdout
    assert {path.name for path in (tmp_path / "run").iterdir()} >= {"efficiency.csv", "efficiency.png"}
    again = run("report", "efficiency", str(tmp_path / "run" / "efficiency.csv"), "--markdown")
    assert again.returncode == 0, again.stderr
    assert "| nystrom-16 |" in again.stdout
