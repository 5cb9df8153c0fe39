"""A command checks its inputs before the work: a wrong name costs no import, and a pipe is not opened."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nystrom.input_files import check_model, read_input
from nystrom_lab.cli.main import main

# The words of each command that reads a model or a file, with the place of what it reads.
READERS = [
    *("inspect {} --texts here", "inspect here --texts {}", "convert {} --to made", "heal here --texts {} --to made"),
    *("convert here --plan {} --to made", "export {} --to made.onnx", "finetune --model ./{} --data here"),
    *("finetune --model here --data {}", "predict --model ./{} --data here", "predict --model here --data {}"),
    *("train listops --model {}", "train listops --data {}", "pretrain --model {} --data here", "pretrain --data {}"),
    *(
        "pretrain listops --model {}",
        "evaluate listops --model {} --data here",
        "evaluate mlm-sop --model {} --data here",
    ),
    *("lra run --to made --model {}", "lra run --to made --data {}", "lra status {}", "lra table {}"),
    *("lra curves {} --figure made.png", "bench model --model {}", "report efficiency {}", "report model {}"),
    *("report training {}", "report study {} --study complexity", "data verify {}", "data show listops --data {}"),
    *("data prepare listops --from {} --to made", "data prepare text --from {} --to made"),
    *("data prepare retrieval --from {} --to made", "data prepare image --from {} --to made"),
    *("data prepare pathfinder --from {} --to made", "data prepare mlm-sop --from {} --tokenizer here --to made"),
    *("data prepare mlm-sop --from here --tokenizer {} --to made", "tokenizer train --from {} --to made"),
    *("reproduce complexity --model {}", "reproduce complexity --texts {}", "reproduce complexity --data {}"),
    "reproduce complexity --runs {}",
]
# Wrong names and numbers, which the command line itself shows.
WRONG = [
    *("finetune nope --model here --data here", "finetune --model here --data here --seed -1"),
    *("finetune --model here --data nope.csv", "evaluate nope --model here --data here"),
    *("train nope", "train listops --preset nope", "train listops --attention nope", "train listops --steps 0"),
    *("pretrain --data here --preset nope", "pretrain --data here --preset demo --seed -1"),
    *("inspect here --texts here --methods nope", "heal here --texts here --to made --seed -1"),
    *("lra run --to made --methods nope", "lra run --to made --tasks nope", "data show nope --data here"),
    *("reproduce nope", "convert here --to made --attention nope"),
]
CODE = """
import json, sys
from nystrom_lab.cli.main import main
found = {}
for words in json.loads(sys.argv[1]):
    code = main(words.format("nowhere").split())
    found[words] = code, [name for name in ("torch", "transformers", "matplotlib") if name in sys.modules]
print(json.dumps(found))
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The current folder, with a folder and a pipe in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    os.mkfifo(tmp_path / "pipe.csv")
    return tmp_path


@pytest.fixture(autouse=True)
def no_waiting():
    """An alarm, so that a pipe that is opened fails the test."""

    def ring(*_):
        raise AssertionError("the pipe was opened")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def test_a_wrong_name_is_told_before_anything_slow_is_imported(here):
    done = subprocess.run([sys.executable, "-c", CODE, json.dumps(READERS)], capture_output=True, text=True)
    assert json.loads(done.stdout) == {words: [2, []] for words in READERS}
    lines = done.stderr.splitlines()
    assert len(lines) == len(READERS)
    assert all("nowhere" in line and ("check the name" in line or "OWNER/NAME" in line) for line in lines)


def test_a_wrong_word_of_a_command_line_is_told_before_anything_slow_is_imported(here):
    done = subprocess.run([sys.executable, "-c", CODE, json.dumps(WRONG)], capture_output=True, text=True)
    assert json.loads(done.stdout) == {words: [2, []] for words in WRONG}
    lines = done.stderr.splitlines()
    assert len(lines) == len(WRONG)
    assert all("nope" in line or "seed is -1" in line or "steps is 0" in line for line in lines)


@pytest.mark.parametrize("words", READERS)
def test_a_pipe_is_refused_in_one_line(words, here, capsys):
    assert main(words.format("pipe.csv").split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "pipe.csv" in line
    assert "is a pipe, which may never end" in line or "is not a folder" in line or "OWNER/NAME" in line
    assert sorted(os.listdir(here)) == ["here", "pipe.csv"]


@pytest.mark.parametrize(
    "words",
    [
        *("convert here --to {}", "heal here --texts here/a.txt --to {}", "export here --to {}.onnx"),
        *("predict --model here --data here/a.txt --to {}.tsv", "inspect here --texts here/a.txt --to {}"),
        *("tokenizer train --from here --to {}", "data prepare text --from here --to {}", "train listops --to {}"),
        "data prepare mlm-sop --from here --tokenizer here --to {}",
    ],
)
def test_a_place_that_nothing_can_be_written_to_is_told_before_anything_is_read(words, here, capsys):
    (here / "here" / "a.txt").write_text("a\n")
    assert main(words.format("here/a.txt/made").split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("nystrom: here/a.txt/made")
    assert line.endswith("cannot be written (Not a directory: here/a.txt): choose another place.")


@pytest.mark.parametrize(
    "words",
    ["convert ../here --to .", "heal ../here --texts ../here --to .", "tokenizer train --from ../texts --to ."],
)
def test_the_current_folder_is_no_place_for_a_new_one(words, here, monkeypatch, capsys):
    (here / "texts").mkdir()
    (here / "texts" / "a.txt").write_text("a\n")
    (here / "empty").mkdir()
    monkeypatch.chdir(here / "empty")
    assert main(words.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "is a mount point, the current folder or one around it, and cannot be replaced: name a folder" in line
    assert sorted(os.listdir(here)) == ["empty", "here", "pipe.csv", "texts"]


@pytest.mark.parametrize(
    "words",
    [
        *("convert run --to made", "inspect run --texts here/a.txt", "export run --to made.onnx"),
        *("predict --model run --data here/a.txt --to made.tsv", "heal run --texts here/a.txt --to made"),
    ],
)
def test_the_folder_of_a_training_names_its_model(words, here, monkeypatch, capsys):
    monkeypatch.chdir(here)
    (here / "run" / "best").mkdir(parents=True)
    (here / "run" / "best" / "config.json").write_text("{}")
    assert main(words.split()) == 2
    assert capsys.readouterr().err == (
        "nystrom: model is run, the folder of a training: name its best model, run/best.\n"
    )


def test_a_pipe_in_a_folder_is_refused_in_one_line(here, tiny_bert, capsys):
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        shutil.rmtree(here / "here")
        shutil.copytree(tiny_bert, here / "here")
        (here / "here" / name).unlink(missing_ok=True)
        os.mkfifo(here / "here" / name)
        assert main(["convert", "here", "--to", "made"]) == 2
        assert f"here/{name} is a pipe" in capsys.readouterr().err
        with pytest.raises(ValueError, match=f"here/{name} is a pipe"):
            check_model("here")
    shutil.rmtree(here / "here")
    (here / "here").mkdir()
    os.mkfifo(here / "here" / "a.txt")
    assert main(["tokenizer", "train", "--from", "here", "--to", "made"]) == 2
    assert "here/a.txt is a pipe" in capsys.readouterr().err
    for label in ("neg", "pos"):
        for part in ("train", "test"):
            (here / "aclImdb" / part / label).mkdir(parents=True)
    os.mkfifo(here / "aclImdb" / "train" / "pos" / "1_9.txt")
    assert main(["data", "prepare", "text", "--from", "aclImdb", "--to", "made"]) == 2
    assert "train/pos/1_9.txt is a pipe" in capsys.readouterr().err


def test_a_device_is_refused_and_a_link_to_a_file_is_read(tmp_path):
    with pytest.raises(ValueError, match=r"/dev/null is a device, which may never end: write its content to a file"):
        read_input(Path("/dev/null"))
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "link").symlink_to("file")
    assert read_input(tmp_path / "link") == b"x"
