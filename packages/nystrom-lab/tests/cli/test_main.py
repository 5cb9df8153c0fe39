import re

import pytest

from nystrom_lab.cli.main import COMMANDS, FIRST, GROUPS, PAPERS, main
from nystrom_lab.measure.rows import Row, append_rows


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
        (["bench", "x"], "there is no command 'bench x'. Commands of bench: 'bench efficiency', 'bench engines', "),
        (
            ["lra", "run", "--tasks", "listops", "--methods", "nystrom", "--preset", "official"],
            "--preset is 'official'; expected one of 'demo', 'modern', 'modern-small', 'nystromformer', "
            "'nystromformer-1000', 'skyformer', 'skyformer-1000'. See nystrom lra run --help.",
        ),
        (["train", "listops", "--attention", "nystorm"], "attention method 'nystorm' is unknown"),
        (["train", "listops", "--attention=nystrom-8"], "option: --attention nystrom --options.num-landmarks 8."),
        (["finetune", "--attention", "near_far-8"], "option: --attention near_far --num-heavy 8 --num-clusters 8."),
        (["train", "listops", "--attention", "softmax-8"], "attention method 'softmax-8' is unknown"),
        (["data", "prepare", "listops", "--to", "x", "--train", "-1"], "--train is -1; expected a whole number of"),
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


@pytest.mark.parametrize(
    ("study", "says"),
    [
        ("training", "expected 'efficiency': try nystrom report training"),
        ("near-far", "rows.csv --study near-far.\n"),
        ("overhead", "expected 'efficiency'.\n"),
    ],
)
def test_rows_of_another_study_are_sent_to_the_command_that_prints_them(study, says, tmp_path, capsys):
    row = Row(study=study, quantity="time", method="nystrom", value=1.0, unit="s", device="cpu")
    append_rows(tmp_path / "rows.csv", [row])
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
    known = {"study": "train text", "method": "nystrom", "unit": "", "seed": 0, "facts": {"preset": "demo"}}
    for on, hours in (("an AMD", 1.5), ("an Intel", 2.5)):
        made = (("training time", 3600 * hours), ("steps", 500))
        rows = [Row(quantity=name, value=value, device=on, **known) for name, value in made]
        append_rows(tmp_path / "rows.csv", rows)
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


def test_without_nystrom_papers_its_commands_are_not_listed_and_say_so(capsys, monkeypatch):
    for name in [name for name in COMMANDS if name.startswith(PAPERS)]:
        monkeypatch.delitem(COMMANDS, name)
    assert main(["--help"]) == 0
    assert "reproduce" not in capsys.readouterr().out
    for words in (
        ["reproduce", "table-1"],
        ["bench", "efficiency", "--to", "x"],
        ["lra", "table"],
        ["measuring", "--help"],
    ):
        assert main(words) == 2
        assert "needs nystrom-papers: pip install nystrom-papers." in capsys.readouterr().err
