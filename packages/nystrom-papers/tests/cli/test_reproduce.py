import pytest

from nystrom_lab.cli.main import main
from nystrom_lab.measure.rows import Row, append_rows
from nystrom_papers.studies.reproduce.catalogue import CATALOGUE


def test_the_list_names_every_study_and_what_was_run(tmp_path, capsys, monkeypatch):
    (tmp_path / "complexity-paper").mkdir()
    (tmp_path / "complexity-paper" / "summary.json").write_text("{}")
    assert main(["reproduce", "--list", "--to", str(tmp_path)]) == 0
    blocks = {block.split(":")[0]: block for block in capsys.readouterr().out.split("\n\n") if block.strip()}
    assert [name.strip() for name in blocks] == list(CATALOGUE)
    assert blocks["complexity"].splitlines()[-1] == "    paper; about 0.6 min on one thread"
    # The page of the repository has rows of all studies, whoever ran them.
    assert blocks["low-rank"].splitlines()[-1].startswith("    no run of yours")
    needs = " ".join(blocks["nystromformer-table-2"].split())
    assert "needs --data with sst2, mrpc ...; --size paper: --model" in needs
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["reproduce", "--list", "--to", str(tmp_path)]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 60


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "got none: nystrom reproduce --list"),
        (["--list", "--all"], "got --list and --all"),
        (["blog", "--all"], "got blog and --all"),
        (["figure-9"], "unknown"),
        (["nystromformer-table-3"], "--runs"),
        (["nystromformer-table-2"], "--data"),
        (["skyformer-figure-1", "--size", "large"], "size"),
        (["skyformer-figure-1", "--size", "paper"], "bert-base-cased"),
        (["skyformer-figure-1", "--model", "nowhere"], "is not a folder"),
        (["skyformer-figure-1", "--texts", "nowhere.txt"], "nowhere.txt"),
        # Also where the study reads none of it.
        (["complexity", "--data", "nowhere"], "data is nowhere, which does not exist: check the name."),
        (["complexity", "--runs", "nowhere"], "runs is nowhere, which does not exist: check the name."),
        (["complexity", "--model", "nowhere"], "model is nowhere, which is not a folder"),
        (["complexity", "--texts", "nowhere.txt"], "texts is nowhere.txt, which does not exist: check the name."),
    ],
)
def test_what_cannot_run_ends_in_one_line(words, says, tmp_path, capsys):
    assert main(["reproduce", *words, "--to", str(tmp_path / "to")]) == 2
    errors = capsys.readouterr().err
    assert says in errors
    assert errors.count("\n") == 1
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize(
    ("config", "says"),
    [(None, "config.json is missing"), ("{", "config.json is not valid JSON"), ("{}", "is of type None, which")],
)
def test_a_folder_that_holds_no_model_ends_in_one_line(config, says, tmp_path, capsys):
    folder = tmp_path / "model"
    folder.mkdir()
    if config is not None:
        (folder / "config.json").write_text(config)
    words = ["skyformer-figure-1", "--model", str(folder), "--to", str(tmp_path / "to")]
    assert main(["reproduce", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(folder) in line
    assert says in line


@pytest.fixture
def gathered(tmp_path):
    file = tmp_path / "rows.csv"
    shared = {"study": "near-far-context", "quantity": "time of 100 questions", "unit": "ms", "n": 2048, "m": 96}
    rows = [
        Row(method=method, value=value, low=value, high=value, device="a CPU", facts={"part": "times"}, **shared)
        for method, value in (("near_far", 50.0), ("near_far, each time", 900.0))
    ]
    append_rows(file, rows)
    return file


def test_gathered_rows_are_printed_as_tables(gathered, capsys):
    words = ["report", "study", str(gathered), "--study", "near-far-context"]
    picture = gathered.with_name("shares.png")
    assert main([*words, "--table", "2", "--verdicts", "--figure", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert out.startswith("ms of 100 questions of 16 queries:\n\n|  | 96 entries |\n")
    assert out.count("| near_far | 50 |") == 1
    assert out.count("| agrees | 96 entries: 50 against 900. |") == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--study", "near-far-context", "--table", "3"], "table is 3 but near-far-context has 2"),
        (["--study", "blog"], "the rows hold no study 'blog'; expected one of near-far-context"),
    ],
)
def test_what_the_rows_do_not_hold_ends_in_one_line(words, says, gathered, capsys):
    assert main(["report", "study", str(gathered), *words]) == 2
    errors = capsys.readouterr().err
    assert says in errors
    assert errors.count("\n") == 1
