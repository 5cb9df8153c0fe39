"""Comments, docstrings and pages name their subject first, as CONTRIBUTING asks.

A sentence that begins with "What", "Of", "Its" or the like leaves the reader to find out what it is about. A few are
plain English, such as "By default" and "By Lemma 1"; hence a limit instead of none.
"""

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("packages", "tests", "examples", "tools")
MOST = 10
_SENTENCES = re.compile(r"(?<=[.!?])\s+|\n\s*\n|\n +\*{0,2}\w+: ")
_BARE = re.compile(r"(What|Of|As|Where|By|Its|That|Those)\b")
_DOCSTRING = re.compile(r'^ *r?"""(.*?)"""', re.MULTILINE | re.DOTALL)
# Blocks of code in a page; and where a cell of a table, or an entry of a list, begins.
_FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_CELL = re.compile(r"\| |^ *(?:[-*]|\d\.) ", re.MULTILINE)
# One comment: the end of a line of code, or successive lines of comments alone.
_COMMENT = re.compile(r"^[^\S\n]*(?:#|//)(.*(?:\n[^\S\n]*(?:#|//).*)*)|\s{2}#(.*)$", re.MULTILINE)


def bare(text: str) -> list[str]:
    """The sentences of a text that begin with such a word."""
    return [sentence for each in _SENTENCES.split(text) if _BARE.match(sentence := each.strip())]


def comments(source: str) -> Iterator[str]:
    for alone, after in _COMMENT.findall(source):
        yield re.sub(r"\s*\n[^\S\n]*(?:#|//)", " ", alone or after)


def sources(*ends: str) -> Iterator[tuple[str, str]]:
    # "build" has copies that a wheel was made of.
    for path in (path for room in ROOMS for end in ends for path in sorted(ROOT.glob(f"{room}/**/*.{end}"))):
        if "build" in path.parts:
            continue
        yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")


def test_a_bare_beginning_is_found():
    assert bare("Of all queries. It reads\nOf tokens.\n\nArgs:\n    x: What is read.") == [
        "Of all queries.",
        "What is read.",
    ]
    assert list(comments("x = 1  # Its size\n    # One\n    # Two.\ny = 2\n// Three\n")) == [
        " Its size",
        " One  Two.",
        " Three",
    ]


def test_comments_name_their_subject():
    found = [f"{path}: {each}" for path, text in sources("py", "cpp") for c in comments(text) for each in bare(c)]
    assert len(found) <= MOST, "\n".join(found)


def test_docstrings_name_their_subject():
    found = [
        f"{path}: {each}" for path, text in sources("py") for doc in _DOCSTRING.findall(text) for each in bare(doc)
    ]
    assert len(found) <= MOST, "\n".join(found)


def test_pages_name_their_subject():
    found = []
    for path in (*ROOT.glob("*.md"), *ROOT.glob("*/README.md"), *ROOT.glob("docs/**/*.md")):
        text = path.read_text(encoding="utf-8")
        # Released versions of the changelog stay as they are.
        text = text.partition("\n## 0.3.0 ")[0] if path.name == "CHANGELOG.md" else text
        found += [f"{path.relative_to(ROOT)}: {each}" for each in bare(_CELL.sub("\n\n", _FENCED.sub("", text)))]
    assert len(found) <= MOST, "\n".join(found)
