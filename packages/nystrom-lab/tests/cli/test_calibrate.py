"""`nystrom convert --calibrate` from a folder and a file of texts to a model with exact heads."""

import torch

from nystrom.attention.plan import PLAN
from nystrom.models import EncoderConfig, EncoderModel
from nystrom_lab.cli.main import main
from nystrom_lab.training.calibrate import told_of_heads

FEW = ["--attention", "near_far", "--exact-up-to", "0", "--block-size", "2", "--reach", "0", "--num-heavy", "0"]
FEW += ["--num-clusters", "2"]


def test_a_model_has_its_exact_heads_and_says_them(tiny_bert, prose, tmp_path, capsys):
    words = ["convert", str(tiny_bert), *FEW, "--calibrate", str(prose)]
    assert main([*words, "--to", str(tmp_path / "own")]) == 0
    *_, line = capsys.readouterr().out.splitlines()
    assert line.startswith("exact heads, as layer.head with their share of the error: ")
    config = EncoderConfig.from_pretrained(tmp_path / "own")
    assert config.attention == PLAN
    assert config.conv_kernel_size is None
    choices = [config.layer_attention(layer) for layer in range(3)]
    heads = [f"{layer}.{head}" for layer, each in enumerate(choices) for head in each.options.get("exact_heads", ())]
    assert 1 <= len(heads) <= 4
    assert all(f"{head} (" in line for head in heads)
    assert {each.method for each in choices} == {"near_far"}
    assert {each.options["num_clusters"] for each in choices} == {2}
    assert main(["convert", str(tiny_bert), *FEW, "--to", str(tmp_path / "plain")]) == 0
    ids = torch.arange(25)[None] % 18 + 5
    states = [EncoderModel.from_pretrained(tmp_path / name)(ids)[0] for name in ("own", "plain")]
    assert not torch.allclose(*states)
    assert main([*words, "--to", str(tmp_path / "own")]) == 2
    assert "own" in capsys.readouterr().err


def test_what_needs_no_exact_heads_says_so_and_is_converted(tiny_bert, prose, tmp_path, capsys):
    words = ["convert", str(tiny_bert), "--calibrate", str(prose), "--to", str(tmp_path / "own")]
    assert main(words) == 0
    assert "exact heads: none, since nystrom-64 is exact at 32 tokens" in capsys.readouterr().out
    assert EncoderConfig.from_pretrained(tmp_path / "own").attention == "nystrom"


def test_what_contradicts_is_refused(tiny_bert, prose, tmp_path, capsys):
    words = ["convert", str(tiny_bert), "--calibrate", str(prose), "--to", str(tmp_path / "own")]
    for more, says in (
        (["--heal", str(prose)], "--heal is a command of its own: nystrom heal MODEL"),
        (["--plan", str(prose)], "plan sets the method of each layer and its exact heads"),
        (["--steps", "3"], "Unrecognized options: --steps"),
    ):
        assert main([*words, *more]) == 2
        assert says in capsys.readouterr().err
    assert not (tmp_path / "own").exists()


def test_heads_that_make_little_are_told():
    measured = {"error": 0.1, "error without exact heads": 0.1, "exact heads": {}, "tokens": 9}
    assert (
        told_of_heads(measured, "near_far")
        == "exact heads: none makes much of the error, 0.100 in the hidden states at 9 tokens"
    )
