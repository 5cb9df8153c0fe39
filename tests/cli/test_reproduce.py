import pytest

from nystrom.cli.main import main
from nystrom.studies.reproduce.catalogue import CATALOGUE


def test_the_list_names_every_study_and_what_was_run(tmp_path, capsys):
    (tmp_path / "complexity-paper").mkdir()
    (tmp_path / "complexity-paper" / "summary.json").write_text("{}")
    assert main(["reproduce", "--list", "--to", str(tmp_path)]) == 0
    blocks = {block.split(":")[0]: block for block in capsys.readouterr().out.split("\n\n") if block.strip()}
    assert [name.strip() for name in blocks] == list(CATALOGUE)
    assert "paper" in blocks["complexity"].splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "--list"),
        (["--list", "--all"], "--list"),
        (["blog", "--all"], "--list"),
        (["figure-9"], "unknown"),
        (["nystromformer-table-3"], "--runs"),
        (["nystromformer-table-2"], "--data"),
        (["skyformer-figure-1", "--size", "large"], "size"),
        (["skyformer-figure-1", "--size", "paper"], "bert-base-cased"),
        (["skyformer-figure-1", "--model", "nowhere"], "is no folder"),
        (["skyformer-figure-1", "--texts", "nowhere.txt"], "nowhere.txt"),
    ],
)
def test_what_cannot_run_ends_in_one_line(words, says, tmp_path, capsys):
    assert main(["reproduce", *words, "--to", str(tmp_path / "to")]) == 2
    errors = capsys.readouterr().err
    assert says in errors
    assert errors.count("\n") == 1
    assert not (tmp_path / "to").exists()
