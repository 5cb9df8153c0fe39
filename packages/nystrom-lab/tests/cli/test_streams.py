"""Closed, broken and full streams: what leaves files goes on, what only prints ends in one line."""

import errno
import importlib.util
import io
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from tqdm import tqdm

from nystrom.progress import Progress
from nystrom_lab.cli import models
from nystrom_lab.cli.faults import expected
from nystrom_lab.cli.main import COMMANDS, LASTING, main
from nystrom_lab.cli.streams import plain_warnings, standing_streams
from nystrom_lab.report.table import Table, print_table

SPEC = importlib.util.spec_from_file_location("cifar_like", Path(__file__).parents[1] / "data" / "cifar_like.py")
cifar_like = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(cifar_like)

# A command that prints more than a buffer holds, and writes a file at its end.
SCRIPT = """
import sys
from pathlib import Path
from nystrom_lab.cli import main, models

def act(words):
    for number in range(2000):
        print("step", number, flush=True)
        print("warning", number, file=sys.stderr)
    Path(words[0]).write_text("done")

models.go = act
main.COMMANDS["go"] = "nystrom_lab.cli.models:go"
main.LASTING |= {"go"} if sys.argv[1] == "True" else set()
sys.exit(main.main(["go", sys.argv[2]]))
"""


def run(redirection, lasting, to):
    words = ["sh", "-c", f'exec "$@" {redirection}', "sh", sys.executable, "-c", SCRIPT, str(lasting), str(to)]
    return subprocess.run(words, capture_output=True, text=True)


@pytest.mark.parametrize("redirection", [">&-", ">&- 2>&-", ">/dev/full", ">/dev/full 2>&1"])
def test_a_command_that_leaves_files_goes_on_where_it_cannot_print(redirection, tmp_path):
    done = run(redirection, True, tmp_path / "file")
    assert done.returncode == 0
    assert (tmp_path / "file").read_text() == "done"
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("redirection", "says"), [(">&-", "is closed"), (">/dev/full", "No space left on device")])
def test_a_command_that_only_prints_ends_in_one_line(redirection, says, tmp_path):
    done = run(redirection, False, tmp_path / "file")
    assert done.returncode == 1
    [line] = [line for line in done.stderr.splitlines() if not line.startswith("warning")]
    assert line.startswith("nystrom: ")
    assert says in line
    assert not (tmp_path / "file").exists()


@pytest.mark.parametrize("lasting", [True, False])
def test_a_reader_that_leaves_ends_only_what_leaves_no_files(lasting, tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    words = [sys.executable, "-c", SCRIPT, str(lasting), str(tmp_path / "file")]
    # Both streams in one pipe, as in `2>&1 | head`.
    done = subprocess.run(words, stdout=writer, stderr=writer if lasting else subprocess.PIPE, text=True)
    os.close(writer)
    assert done.returncode == 0
    assert (tmp_path / "file").exists() == lasting


def test_help_that_cannot_be_printed_is_a_fault():
    words = ["sh", "-c", 'exec "$@" >/dev/full', "sh", sys.executable, "-m", "nystrom_lab", "methods", "--help"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1


def test_what_trains_and_measures_leaves_files():
    assert {"train", "pretrain", "finetune", "lra run", "reproduce", "bench efficiency"} <= LASTING <= COMMANDS.keys()
    assert not LASTING & {"methods", "predict", "lra table", "evaluate", "data show"}


def test_a_warning_is_one_line(tmp_path):
    folder = cifar_like.write_binary(tmp_path / "cifar-10-batches-bin", cifar_like.make_batches())
    words = f"data prepare image --from {folder} --to {tmp_path / 'image'} --val 20 --no-check-counts".split()
    done = subprocess.run([sys.executable, "-m", "nystrom_lab", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert [line.partition(" holds ")[0] for line in lines] == [f"warning: {folder}"] * 2, lines


def test_a_warning_of_others_keeps_its_place():
    usual = warnings.formatwarning
    with plain_warnings():
        assert warnings.formatwarning("late", UserWarning, os.__file__, 3, "x") == usual(
            "late", UserWarning, os.__file__, 3, "x"
        )
    assert warnings.formatwarning is usual


NAME = "a\x1b[31m\x9b2J\rb\x07\udcff"
SHOWN = r"a\x1b[31m\x9b2J\rb\x07\udcff"


def terminal(monkeypatch):
    """What reaches standard output and error, both, from now on."""
    came = io.StringIO()
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, f"__{name}__", came)
        monkeypatch.setattr(sys, name, came)
    return came


def test_what_is_printed_controls_no_terminal(monkeypatch):
    def act(words):
        print(f"found {NAME}\tü")
        print_table(Table(NAME, [NAME], [[NAME]]))
        Progress(NAME, 2)._say(f"{NAME}: 1 of 2")
        print(f"notice: {NAME}", file=sys.stderr)
        raise ValueError(f"device {NAME} is unknown")

    monkeypatch.setitem(COMMANDS, "go", "nystrom_lab.cli.models:go")
    monkeypatch.setattr(models, "go", act, raising=False)
    came = terminal(monkeypatch)
    assert main(["go"]) == 2
    said = came.getvalue()
    assert not set(said) & {"\x1b", "\x9b", "\r", "\x07", "\udcff"}
    assert f"found {SHOWN}\tü\n" in said
    assert f"notice: {SHOWN}\n" in said
    # In one line, a line end is a blank.
    assert f"nystrom: device {SHOWN} is unknown\n".replace("\\r", " ") in said
    assert said.count("31m") == 7


def test_what_draws_does(monkeypatch):
    came = terminal(monkeypatch)
    with standing_streams(lasting=True):
        tqdm(range(2), desc="bar", file=sys.stderr, mininterval=0).update()
        tqdm(range(2), desc="lower", position=1, file=sys.stderr, mininterval=0).update()
        sys.stdout.styled.write("\x1b[1mhelp\x1b[0m")
    drawn = came.getvalue()
    assert all(part in drawn for part in ("\rbar:  50%", "\n\rlower:", "\x1b[A", "\x1b[1mhelp\x1b[0m"))


def test_an_error_of_the_system_names_a_file_without_its_control_characters():
    fault = expected(FileNotFoundError(errno.ENOENT, "No such file", NAME), "predict", [])
    assert fault.line == f"{SHOWN} cannot be used (No such file): check the name."
