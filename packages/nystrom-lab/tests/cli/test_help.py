"""Questions that names, signatures and docstrings answer load no slow package."""

import io
import json
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import fields

import pytest

from nystrom_lab.cli.main import COMMANDS, main

SLOW = ("torch", "transformers", "accelerate", "matplotlib", "scipy")
# Packages of the extras, which `make demo` does not install.
EXTRAS = ("submitit", "tensorboard", "sentence_transformers", "onnx", "timm", "nystrom_attention")
# One process asks everything, and says after each question what was loaded.
CODE = f"""
import contextlib, io, json, sys
sys.modules |= dict.fromkeys({EXTRAS})  # as if they were not installed
from nystrom_lab.cli.main import main
answers = {{}}
for question in json.loads(sys.argv[1]):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            code = main(question.split())
        except SystemExit as stop:
            code = stop.code
    answers[question] = code, printed.getvalue(), [name for name in {SLOW} if name in sys.modules]
print(json.dumps(answers))
"""


# Under -OO Python strips the docstrings that the texts of the help come from.
@pytest.mark.parametrize("flags", [[], pytest.param(["-OO"], marks=pytest.mark.long)], ids=str)
def test_help_and_lists_need_no_slow_import_and_no_extra(flags):
    questions = ["", "--help", "--version", "methods", "methods --markdown", "training --help"]
    questions += [f"{name} --help" for name in COMMANDS]
    done = subprocess.run([sys.executable, *flags, "-c", CODE, json.dumps(questions)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    assert {question: (code, slow) for question, (code, _, slow) in answers.items()} == dict.fromkeys(
        questions, (0, [])
    )
    assert all(f"usage: nystrom {name}" in answers[f"{name} --help"][1] for name in COMMANDS)
    assert ("strips the texts of this help" in done.stderr) == bool(flags)


def said(*words):
    """The exit code of a command, and what it writes to both streams."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(words)
    return code, out.getvalue(), err.getvalue()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("train", 'Missing from nystrom train: TASK (Task, such as "listops"). See nystrom train --help.'),
        ("data show", "Missing from nystrom data show: TASK"),
        ("convert bert", "Missing from nystrom convert: --to PATH"),
        ("report training x.csv --figure", "Missing value for argument '--figure'"),
        ("data prepare image --from x --to y --size two", "Unrecognized options: --size, two"),
        ("bench training --repeats two", "--repeats is 'two'; expected a whole number. See"),
        ("finetune --model m --data x --search.seed 8 8", "search.seed is 8 8, with a repeated value: leave the rep"),
        ("train listops --adam-betas 0.9 x", "--adam-betas is '0.9', 'x'; expected two numbers. See"),
        ("bench training --limit-seconds x", "--limit-seconds is 'x'; expected a number. See"),
        ("convert m --to x --num-landmarks many", "--num-landmarks is 'many'; expected a whole number or 'auto'. See"),
        ("convert m --to x --max-position-embeddings 1e3", "--max-position-embeddings is '1e3'; expected a whole num"),
        ("bench efficiency --lengths 512 1k", "--lengths is '512', '1k'; expected a whole number. See"),
        ("bench efficiency --methods", "--methods names nothing; expected at least one value, or leave it out."),
        ("inspect bert --texts --length 64", "--texts names nothing; expected at least one value. See"),
        ("finetune --model bert --data", "--data names nothing; expected at least one value. See"),
        ("pretrain", "Missing from nystrom pretrain: --data PATH"),
        ("pretrain listops --label 3", "Unrecognized options: --label, 3"),
        ("train listops --mask-share 0.1", "Unrecognized options: --mask-share, 0.1"),
        ("methods --markdwon", "Unrecognized options: --markdwon; perhaps you meant --markdown. See"),
    ],
)
def test_a_wrong_command_line_ends_in_one_line(words, says):
    code, _, err = said(*words.split())
    (line,) = err.splitlines()
    assert line.startswith(f"nystrom: {says}")
    assert line.endswith("--help.")
    assert code == 2


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("pretrain lisops --preset demo", "task 'lisops' is unknown; expected one of image, listops, pathfinder"),
        ("pretrain listops --mask-share 0", "mask_share is 0; expected a number in (0, 1)"),
        ("pretrain --data . --preset demo --steps 0", "steps is 0; expected a whole number of at least 1."),
    ],
)
def test_pretrain_has_a_door_for_a_task_and_one_for_prepared_texts(words, says):
    code, _, err = said(*words.split())
    (line,) = err.splitlines()
    assert line.startswith(f"nystrom: {says}")
    assert code == 2


def test_the_help_of_pretraining_on_a_task_has_the_share_of_the_task():
    with redirect_stdout(io.StringIO()) as printed, pytest.raises(SystemExit):
        main(["pretrain", "image", "--help"])
    shown = " ".join(printed.getvalue().split())
    assert "--mask-share FLOAT" in shown
    assert "(default: 0.5)" in shown
    with redirect_stdout(io.StringIO()) as printed, pytest.raises(SystemExit):
        main(["train", "--help"])
    assert "--mask-share" not in printed.getvalue()


@pytest.mark.parametrize(
    ("words", "method", "option"),
    [("convert", "nystrom", "--num-landmarks"), ("convert --attention near_far", "near_far", "--num-heavy")],
)
def test_the_help_says_whose_options_it_lists_and_how_to_list_others(words, method, option):
    with redirect_stdout(io.StringIO()) as printed, pytest.raises(SystemExit):
        main([*words.split(), "--help"])
    shown = " ".join(printed.getvalue().split())
    assert f"options of attention are those of {method}: --attention NAME --help lists those of another." in shown
    assert option in shown


def test_methods_shows_every_column_in_eighty_characters_when_piped(monkeypatch):
    from nystrom.attention.registry import METHODS

    monkeypatch.delenv("COLUMNS", raising=False)
    _, printed, _ = said("methods")
    assert max(map(len, printed.splitlines())) <= 80
    words = " ".join(printed.split())
    for name, method in METHODS.items():
        shown = (name, method.summary, method.cost, method.exact_limit, method.source)
        assert all(" ".join(text.split()) in words for text in shown), name
        assert all(f"{option.name}={option.default!r}" in words for option in fields(method.options)), name


def test_a_tyro_that_does_not_tell_its_errors_prints_them(monkeypatch):
    import tyro

    monkeypatch.delattr(tyro._errors, "on_parse_error")
    err = io.StringIO()
    with redirect_stderr(err), pytest.raises(SystemExit) as stop:
        main(["methods", "--markdwon"])
    assert stop.value.code == 2
    assert "--markdwon" in err.getvalue()
