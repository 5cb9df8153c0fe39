"""`nystrom inspect` from a folder and a file to rows, figures and a verdict."""

import shutil

import pytest
from transformers import AlbertConfig, AlbertModel, PreTrainedModel

from nystrom.attention.plan import read_plan
from nystrom.models import EncoderConfig
from nystrom.models.files.model_fingerprint import model_fingerprint
from nystrom_lab.cli.main import main
from nystrom_lab.measure.rows import read_rows
from nystrom_lab.report.inspection import TIME


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
    assert {row.fact("fingerprint") for row in rows} == {model_fingerprint(tiny_bert)}
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert names == {"rows.csv", "verdict.txt"} | {
        f"{name}.{suffix}" for name in ("errors", "attention", "sizes") for suffix in ("png", "svg")
    }
    assert main(words) == 2
    assert "rows.csv already exists and is not overwritten" in capsys.readouterr().err


@pytest.mark.parametrize("file", ["verdict.txt", "errors.png"])
def test_a_file_that_came_while_the_model_was_inspected_stays(file, tiny_bert, prose, tmp_path, monkeypatch, capsys):
    def late(path, rows):
        (path.parent / file).write_text("mine")

    monkeypatch.setattr("nystrom_lab.measure.rows.append_rows", late)
    words = ["inspect", str(tiny_bert), "--texts", str(prose), "--methods", "nystrom-4", "--num-texts", "1"]
    assert main([*words, "--length", "16", "--to", str(tmp_path / "out")]) == 2
    assert f"{file} already exists and is not" in capsys.readouterr().err
    assert (tmp_path / "out" / file).read_text() == "mine"


def test_mistakes_end_in_one_line(tiny_bert, prose, tmp_path, capsys):
    bare = shutil.copytree(tiny_bert, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*", "vocab*"))
    for words, says in (
        ((str(tmp_path), "--texts", str(prose)), "config.json is missing: name a folder in Hugging Face format"),
        ((str(tiny_bert), "--texts", str(prose), "--methods", "nystrm"), "nystrm"),
        (
            (str(tiny_bert), "--texts", str(prose), "--length", "33"),
            f"length is 33 but the model has 32 positions: take fewer, or make more with `nystrom convert {tiny_bert} "
            "--to OTHER --max-position-embeddings 33`.",
        ),
        ((str(tiny_bert), "--texts", str(prose), "--num-texts", "1000"), "name more or longer files"),
        ((str(tiny_bert), "--texts", str(tmp_path / "none.txt")), "none.txt"),
        # Nothing that the command line has no place for.
        ((str(bare), "--texts", str(prose)), "copy the files of the tokenizer that it was trained with into the"),
    ):
        assert main(["inspect", *words]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("nystrom: ")
        assert says in line
        assert "tokenizer=" not in line


def test_a_length_beyond_the_positions_is_refused_before_the_weights_are_read(
    tiny_bert, prose, tmp_path, monkeypatch, capsys
):
    def read(*_, **__):
        raise AssertionError("weights are read")

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", read)
    words = ["inspect", str(tiny_bert), "--texts", str(prose), "--length", "33", "--to", str(tmp_path / "out")]
    assert main(words) == 2
    assert "32 positions" in capsys.readouterr().err


def test_a_budget_gives_a_plan_that_convert_takes(tiny_bert, prose, tmp_path, capsys):
    words = ["inspect", str(tiny_bert), "--texts", str(prose), "--num-texts", "1", "--threads", "1", "--device", "cpu"]
    words += ["--methods", "nystrom-4", "softmax", "--budget", "0.001"]
    assert main(words) == 2
    assert "name one with --to" in capsys.readouterr().err
    assert main([*words, "--to", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    plan = read_plan(tmp_path / "out" / "plan.json")
    assert plan.measurements["error"] <= 0.001
    assert f"Within a budget of 0.001: {plan}." in " ".join(printed.split())
    assert max(map(len, (tmp_path / "out" / "verdict.txt").read_text().splitlines())) <= 80
    rows = read_rows(tmp_path / "out" / "rows.csv")
    (time,) = (row for row in rows if (row.method, row.quantity) == ("nystrom_plan", TIME))
    assert [time.low, time.high] == plan.measurements["quartiles of the mean ms"]
    assert time.fact("fingerprint") == model_fingerprint(tiny_bert)
    # The plan rests on the times that the verdict prints, not on others.
    exact = next(row.value for row in rows if (row.method, row.quantity) == ("softmax", TIME))
    assert plan.measurements["ms of a layer's attention"]["softmax"] == pytest.approx(exact, abs=1e-4)
    done = ["convert", str(tiny_bert), "--to", str(tmp_path / "own"), "--plan", str(tmp_path / "out" / "plan.json")]
    assert main(done) == 0
    config = EncoderConfig.from_pretrained(tmp_path / "own")
    assert [config.layer_attention(layer) for layer in range(3)] == list(plan.layers)
    assert main([*words, "--to", str(tmp_path / "none"), "--methods", "nystrom-4"]) == 2
    assert "the closest is an error of" in capsys.readouterr().err


def test_layers_that_no_plan_can_name_are_told_before_anything_is_measured(tiny_bert, prose, tmp_path, capsys):
    folder = shutil.copytree(tiny_bert, tmp_path / "albert")
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
    AlbertModel(AlbertConfig(vocab_size=40, max_position_embeddings=32, **sizes)).save_pretrained(folder)
    words = ["inspect", str(folder), "--texts", str(prose), "--num-texts", "1", "--device", "cpu"]
    assert main([*words, "--budget", "9", "--to", str(tmp_path / "out")]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "the layers of AlbertModel have no numbers" in said.err
    assert list((tmp_path / "out").iterdir()) == []
