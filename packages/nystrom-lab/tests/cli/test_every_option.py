"""The options of all commands are those of the list beside this file, which a change is meant to change.

`python packages/nystrom-lab/tests/cli/test_every_option.py` writes the list anew.
"""

import contextlib
import io
import os
import re
from pathlib import Path
from unittest import mock

from nystrom_lab.cli.main import COMMANDS, main

LIST = Path(__file__).with_name("every_option.txt")
DEFAULT = re.compile(r"\((default: [^)]*|required|repeatable)\)$")
# An option or an argument, at the beginning of its line, whether boxes are drawn or not; its help is further in.
ITEM = re.compile(r"^[│ ] {0,2}(--?[a-z]|[\[A-Z{])")


def options_of(command):
    """Names, values and defaults of the options of a command, by its help."""
    said = io.StringIO()
    with (
        # From 130 on there may be two columns.
        mock.patch.dict(os.environ, {"COLUMNS": "129"}),
        contextlib.redirect_stdout(said),
        contextlib.suppress(SystemExit),
    ):
        main([*command.split(), "--help"])
    found = []
    for line in said.getvalue().partition("\n\n")[2].splitlines():
        text = line.strip("│╭╮╰╯─ ")
        if ITEM.match(line) and (text.startswith("-") or not text.endswith(".")):
            found.append([re.split(r"\s{2,}", text)[0], text])
        elif found:
            # A default may go on in the next line.
            found[-1][1] += f" {text}" if text else "\n"
    defaults = [DEFAULT.search(text.partition("\n")[0].rstrip()) for _, text in found]
    return sorted(
        name + (f" ({default[1]})" if default else "") for (name, _), default in zip(found, defaults, strict=True)
    )


def listed():
    return "".join(f"{command} {option}\n" for command in COMMANDS for option in options_of(command))


def test_every_command_has_the_options_that_are_listed():
    assert listed() == LIST.read_text(encoding="utf-8")


if __name__ == "__main__":
    LIST.write_text(listed(), encoding="utf-8")
