"""The help of a training has the numbers of its preset, and the training has them, too."""

import contextlib
import io

import pytest

from nystrom_lab.cli.main import main


def helped(*words):
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        main([*words, "--help"])
    return " ".join(said.getvalue().replace("│", " ").split())


@pytest.fixture
def given(monkeypatch):
    """The options that a command line gives to a training."""
    values = {}
    monkeypatch.setattr("nystrom_lab.training.train.train", lambda options: values.update(vars(options)))
    return values


def test_the_help_has_the_numbers_of_the_preset_and_of_the_method():
    said = helped("train")
    assert said.count("(default: None)") < 10
    assert "Defaults are those of listops with the preset nystromformer" in said
    said = helped("train", "image", "--preset", "modern", "--attention", "near_far", "--steps", "90000")
    assert "Peak learning rate, at the end of the warm-up. (default: 0.0005)" in said
    # A shorter run has a shorter warm-up.
    assert "Steps of linear warm-up. (default: 4500)" in said
    assert "Queries of a block, which all see the same keys. (default: 64)" in said


def test_what_is_not_typed_is_the_preset_s_and_follows_what_is_typed(given):
    assert main(["train", "listops", "--preset", "demo", "--steps", "50", "--positions", "rotary"]) == 0
    demo = {"attention": "nystrom", "batch_size": 32, "dropout": 0.1, "learning_rate": 2e-3, "rotary_share": 1.0}
    follows = {"steps": 50, "warmup_steps": 7, "evaluate_every": 50, "log_every": 50}
    assert {name: given[name] for name in demo | follows} == demo | follows
    # The method and the length of the data decide these later.
    assert (given["options"], given["conv_kernel_size"], given["max_length"]) == ({}, None, None)


def test_what_is_typed_is_given_though_it_is_the_preset_s(given):
    words = "--batch-size=32 --warmup_steps 1000 --positions learned --options.num-landmarks 128"
    assert main(["train", "listops", "--preset", "nystromformer", *words.split()]) == 0
    assert (given["batch_size"], given["warmup_steps"], given["position_kind"]) == (32, 1000, "learned")
    assert given["options"] == {"num_landmarks": 128}


def test_the_help_of_a_pretraining_has_the_numbers_of_its_preset():
    said = helped("pretrain", "--preset", "demo", "--steps", "1000")
    for text in ("Steps of linear warm-up. (default: 100)", "Width of a token. (default: 256)", "(default: 0.0005)"):
        assert text in said
    # These come from the model that it lengthens.
    assert "Width of a token. (default: None)" in helped("pretrain", "--preset", "longer")


def test_a_model_decides_itself(given, tmp_path):
    assert "Defaults are those of" not in helped("train", "listops", "--model", str(tmp_path))
