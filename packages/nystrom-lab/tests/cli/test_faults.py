"""Every expected fault ends in one line with its exit code; an error of the program keeps its traceback."""

import errno
import functools
import json
import os
import pickle
import resource
import shutil
import subprocess
from contextlib import contextmanager

import pytest
import torch
from safetensors import SafetensorError
from transformers import BertForSequenceClassification

from nystrom_lab.cli import models
from nystrom_lab.cli.main import main


@pytest.fixture
def ends(monkeypatch, capsys):
    """The exit code and the line of a command that raises."""

    def ended(error):
        def act(words):
            raise error

        monkeypatch.setattr(models, "convert_model", act)
        code = main(["convert", "bert", "--to", "made/model"])
        [line] = capsys.readouterr().err.splitlines()
        return code, line.removeprefix("nystrom: ")

    return ended


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (ValueError("a line\n  of two"), 2, "a line of two"),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "x.csv"), 2, "x.csv cannot be used (No such"),
        (IsADirectoryError(errno.EISDIR, "Is a directory", ".x.partial", None, "x.tsv"), 2, "x.tsv cannot be used"),
        (PermissionError(errno.EACCES, "Permission denied", b"/root/x"), 2, "/root/x cannot be used (Permission"),
        (OSError(errno.ENOSPC, "No space left on device"), 1, "made/model cannot be read or written (No space"),
        (OSError(errno.EIO, "Input/output error", "x"), 1, "x cannot be read or written (Input/output error): fix"),
        (OSError("run/best cannot be written: make room"), 1, "run/best cannot be written: make room"),
        (SafetensorError("I/O error: No space left on device (os error 28)"), 1, "made/model cannot be read or writ"),
        (pickle.UnpicklingError("Weights only load failed. Much\nmore"), 2, "never run (Weights only load failed): "),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), 1, "too little memory (CUDA out of"),
        (MemoryError(), 1, "too little memory (none is left)"),
    ],
)
def test_an_expected_fault_is_one_line(ends, error, code, says):
    ended = ends(error)
    assert ended[0] == code
    assert says in ended[1]
    assert "[Errno" not in ended[1]


@pytest.mark.parametrize(
    "error", [KeyError("x"), TypeError("x"), RuntimeError("x"), AssertionError(), AttributeError()]
)
def test_an_error_of_the_program_is_not_hidden(ends, error):
    with pytest.raises(type(error)):
        ends(error)


@pytest.fixture(scope="session")
def classifier(tiny_bert, tmp_path_factory):
    """The folder of the tiny model with a head for two classes."""
    folder = shutil.copytree(tiny_bert, tmp_path_factory.mktemp("classifier") / "model")
    BertForSequenceClassification.from_pretrained(tiny_bert, num_labels=2).save_pretrained(folder)
    return folder


@contextmanager
def no_growing(to):
    """Files cannot grow: the system calls fail as on a full disk, also where no disk can be mounted."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        yield to / "out"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def full_disk(to):
    """A disk of one page, which is full."""
    disk = to / "disk"
    disk.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(disk)], capture_output=True, text=True
    ) if os.geteuid() == 0 else None  # fmt: skip
    if done is None or done.returncode:
        pytest.skip(f"no disk can be mounted here: {done.stderr.strip() if done else 'needs root'}")
    try:
        (disk / "filling").write_bytes(bytes(4096))
        yield disk / "out"
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("full", [no_growing, full_disk])
@pytest.mark.parametrize("command", ["convert", "predict", "bench efficiency"])
def test_a_full_disk_ends_a_command_in_one_line_that_names_the_output(
    full, command, tiny_bert, classifier, tmp_path, capsys
):
    texts = tmp_path / "texts.txt"
    texts.write_text("a river\n")
    words = {
        "convert": ["convert", str(tiny_bert)],
        "predict": ["predict", "--model", str(classifier), "--data", str(texts), "--device", "cpu"],
        "bench efficiency": ["bench", "efficiency", *["--lengths", "32", "--methods", "softmax", "--repeats", "1"]],
    }[command]
    with full(tmp_path) as to:
        if command == "predict":
            to = to.with_suffix(".tsv")
        code = main([*words, "--to", str(to)])
    said = capsys.readouterr().err
    [line] = [line for line in said.splitlines() if line.startswith("nystrom: ")]
    # The output itself, or a file in it.
    assert line.startswith(f"nystrom: {to}")
    assert " cannot be read or written (" in line
    assert "make room for it" in line
    assert "Traceback" not in said
    assert code == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"intermediate_size": 64},
        {"num_hidden_layers": 4},
        {"num_hidden_layers": 10**6},
        {"more": functools.reduce(lambda inside, _: [inside], range(300), [])},
    ],
)
@pytest.mark.parametrize("command", ["predict", "inspect", "convert"])
def test_a_model_that_does_not_fit_its_config_ends_in_one_line(command, changes, classifier, prose, tmp_path, capfd):
    folder = shutil.copytree(classifier, tmp_path / "model")
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    words = {
        "predict": ["predict", "--model", str(folder), "--data", str(prose)],
        "inspect": ["inspect", str(folder), "--texts", str(prose)],
        "convert": ["convert", str(folder), "--to", str(tmp_path / "made")],
    }[command]
    assert main(words) == 2
    said = capfd.readouterr()
    [line] = said.err.splitlines()
    assert str(folder) in line
    assert "config.json" in line
    assert said.out == ""


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": ["bert"]}, "is of type ['bert']"),
        ({"attn_implementation": "someone/kernel"}, "attn_implementation = 'someone/kernel', which a package or down"),
        ({"auto_map": {"AutoModel": "own.Own"}, "model_type": "own"}, "is of type 'own'"),
    ],
)
@pytest.mark.parametrize("command", ["predict", "inspect", "finetune", "heal", "bench", "reproduce"])
def test_a_model_that_asks_for_other_code_ends_every_command_in_one_line(
    command, changes, says, classifier, prose, tmp_path, capfd
):
    folder = shutil.copytree(classifier, tmp_path / "model")
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    (folder / "own.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')\nclass Own: pass\n")
    (tmp_path / "train.tsv").write_text("text\tlabel\na river\t0\na stone\t1\n")
    to = ["--to", str(tmp_path / "made")]
    words = {
        "predict": ["predict", "--model", str(folder), "--data", str(prose)],
        "inspect": ["inspect", str(folder), "--texts", str(prose)],
        "finetune": ["finetune", "--model", str(folder), "--data", str(tmp_path), *to],
        "heal": ["heal", str(folder), *to, "--texts", str(prose), "--device", "cpu"],
        "bench": ["bench", "model", "--model", str(folder), *to],
        "reproduce": ["reproduce", "low-rank", "--model", str(folder), "--texts", str(prose), *to],
    }[command]
    assert main(words) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert says in line
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize(("name", "content"), [("texts.txt", ""), ("texts.tsv", "text\tlabel\n")])
def test_a_file_without_texts_is_named_and_nothing_is_written(name, content, classifier, tmp_path, capsys):
    (tmp_path / name).write_text(content)
    to = tmp_path / "out.tsv"
    words = ["--model", str(classifier), "--data", str(tmp_path / name), "--to", str(to), "--device", "cpu"]
    assert main(["predict", *words]) == 2
    assert capsys.readouterr().err == f"nystrom: data is {tmp_path / name}, which holds no texts: name another file.\n"
    assert not to.exists()
