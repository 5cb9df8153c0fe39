"""`nystrom inspect` from a folder and a file to rows, figures and a verdict."""

from nystrom.cli.main import main
from nystrom.measure.rows import read_rows


def test_inspect_writes_a_verdict_rows_and_figures(tiny_bert, prose, tmp_path, capsys):
    words = ["inspect", str(tiny_bert), "--texts", str(prose), "--methods", "nystrom-4", "nystrom-8"]
    words += ["--num-texts", "2", "--threads", "1", "--device", "cpu", "--to", str(tmp_path / "out")]
    assert main(words) == 0
    printed = capsys.readouterr().out
    verdict = (tmp_path / "out" / "verdict.txt").read_text()
    assert printed.startswith(verdict)
    assert "tiny-bert, on prose.txt" in verdict
    assert "2 texts of 32 tokens, 128 queries of each sampled; 3 layers of 4 heads" in verdict
    assert max(map(len, verdict.splitlines())) <= 80
    rows = read_rows(tmp_path / "out" / "rows.csv")
    assert {row.method for row in rows} == {"softmax", "nystrom-4", "nystrom-8"}
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert names == {"rows.csv", "verdict.txt"} | {
        f"{name}.{suffix}" for name in ("errors", "attention", "sizes") for suffix in ("png", "svg")
    }
    assert main(words) == 2
    assert "holds the rows of an inspection" in capsys.readouterr().err


def test_mistakes_end_in_one_line(tiny_bert, prose, tmp_path, capsys):
    for words, says in (
        ((str(tmp_path), "--texts", str(prose)), "holds no model.safetensors"),
        ((str(tiny_bert), "--texts", str(prose), "--methods", "nystrm"), "nystrm"),
        ((str(tiny_bert), "--texts", str(prose), "--num-texts", "1000"), "name more or longer files"),
        ((str(tiny_bert), "--texts", str(tmp_path / "none.txt")), "none.txt"),
    ):
        assert main(["inspect", *words]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("nystrom: ")
        assert says in line
