"""Write the tables of the pages from the rows in results/.

    python tools/write_tables.py

A table stands between two lines of a page, the first with the command that prints it, of nystrom or of a tool:

    <!-- nystrom report efficiency results/FILE.csv --markdown -->
    <!-- end -->

The text between them is replaced by what the command prints. Between `<!-- laws -->` and the end stand the tests of
each law, by their mark in test_every_method.py. A page that would change, and --check, is an error.
"""

import argparse
import contextlib
import io
import re
import runpy
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from nystrom_lab.cli.main import main as nystrom

ROOT = Path(__file__).resolve().parents[1]
LAWS = ROOT / "packages" / "nystrom" / "tests" / "attention" / "test_every_method.py"
_BEGIN = r"<!-- (?P<command>(?:nystrom|python tools/).*?) -->\n"
_TABLE = re.compile(rf"{_BEGIN}(?P<body>.*?)<!-- end -->\n", re.DOTALL)

_LAWS = re.compile(r"(?<=<!-- laws -->\n).*?(?=<!-- end -->\n)", re.DOTALL)
_LAW = re.compile(r"^@pytest\.mark\.law\((\d)\)\n(?:(?!def ).*\n)*?def (test_\w+)", re.MULTILINE)


def pages(root: Path) -> list[Path]:
    """The pages that may hold tables."""
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]


def commands(page: str) -> list[str]:
    """The commands of a page's tables."""
    return [found["command"] for found in _TABLE.finditer(page)]


def written(page: str) -> str:
    """The page with its tables as their commands print them, from the folder in which the commands find their files.

    Raises:
        ValueError: A command that fails, or a table without an end.
    """
    begins = len(re.findall(_BEGIN, page))
    if begins != len(commands(page)):
        raise ValueError(f"{begins} tables begin and {len(commands(page))} end: put <!-- end --> below each.")
    page = _LAWS.sub(lambda _: laws(LAWS.read_text(encoding="utf-8")), page)
    return _TABLE.sub(lambda found: f"<!-- {found['command']} -->\n{_printed(found['command'])}<!-- end -->\n", page)


def laws(tests: str) -> str:
    """The tests of each law as a list, by the mark `law` in their source."""
    names: dict[str, list[str]] = {}
    for law, name in _LAW.findall(tests):
        names.setdefault(law, []).append(f"`{name}`")
    return "\n".join(["", *(f"- Law {law}: {', '.join(names[law])}." for law in sorted(names)), "", ""])


def _printed(command: str) -> str:
    out, said = io.StringIO(), io.StringIO()
    program, *words = shlex.split(command)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(said):
        code = nystrom(words) if program == "nystrom" else _run(words)
    if code:
        raise ValueError(f"{command} ended with {code}: {said.getvalue().strip()}")
    return f"\n{out.getvalue().strip()}\n\n"


def _run(words: list[str]) -> object:
    """Run a tool as Python would; the exit code."""
    before, sys.argv = sys.argv, words
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        return end.code
    finally:
        sys.argv = before
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the pages, or compare them; the exit code is 0 where they are right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; say which pages differ")
    asked = parser.parse_args(arguments)
    differ = []
    with contextlib.chdir(ROOT):
        for path in pages(ROOT):
            before = path.read_text(encoding="utf-8")
            after = written(before)
            if after != before:
                differ.append(path.relative_to(ROOT))
                if not asked.check:
                    path.write_text(after, encoding="utf-8")
    if asked.check and differ:
        print(f"{', '.join(map(str, differ))}: not what results/ says: python tools/write_tables.py", file=sys.stderr)
        return 1
    print("\n".join(map(str, differ)) or "nothing to change")
    return 0


if __name__ == "__main__":
    sys.exit(main())
