"""Every command that stands beside a number in results/ is still read by the command line."""

import contextlib
import csv
import io
import shlex
from pathlib import Path

import pytest
import tyro

from nystrom_lab.cli.main import main

RESULTS = Path(__file__).parents[4] / "results"
# Commands that are no longer there; results/README.md names them with the commits that have them.
REMOVED = ("bench pretraining", "bench ranks", "bench runs")


class ReadError(BaseException):
    """The words are read; nothing is run."""


@pytest.fixture
def only_read(monkeypatch):
    """A command ends once its words are read."""
    read = tyro.cli

    def stop(*given, **named):
        read(*given, **named)
        raise ReadError

    monkeypatch.setattr(tyro, "cli", stop)


def recorded() -> list[list[str]]:
    """The words after `nystrom` of each recorded command, once; those of other programs are left out."""
    found = set[str]()
    for file in RESULTS.rglob("*.csv"):
        with file.open(encoding="utf-8", newline="") as rows:
            found |= {row.get("command") or "" for row in csv.DictReader(rows)}
    each = [shlex.split(command) for command in sorted(found)]
    each = [words[words.index("nystrom_lab") :] if "nystrom_lab" in words[:6] else words for words in each]
    return [healing(words[1:]) for words in each if words[:1] in (["nystrom"], ["nystrom_lab"])]


def healing(words: list[str]) -> list[str]:
    """A healing as it was recorded, `convert MODEL --heal TEXTS`, as the command that it is now."""
    if words[0] != "convert" or "--heal" not in words:
        return words
    return ["heal", *("--texts" if word == "--heal" else word for word in words[1:])]


@pytest.mark.long
def test_each_recorded_command_is_read(only_read):
    commands = [words for words in recorded() if not " ".join(words).startswith(REMOVED)]
    assert len(commands) > 200
    refused = {}
    for words in commands:
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                main(words)
        except ReadError:
            continue
        refused[shlex.join(words)] = said.getvalue()
    assert not refused
