"""Comments, docstrings and pages keep the rules of language of CONTRIBUTING that a pattern can find.

A few sentences that a pattern finds are plain English, such as "By default" and "By Lemma 1"; hence a limit instead of
none.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("packages", "tests", "examples", "tools")
MOST = 10
_SENTENCES = re.compile(r"(?<=[.!?])\s+|\n\s*\n|\n +\*{0,2}\w+: ")
_DOCSTRING = re.compile(r'^ *r?"""(.*?)"""', re.MULTILINE | re.DOTALL)
# Blocks of code in a page; and where a cell of a table, or an entry of a list, begins.
_FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_CELL = re.compile(r"\| |^ *(?:[-*]|\d\.) ", re.MULTILINE)
# Tables, those that commands print with the lines below them, and what is no word of a sentence: code and addresses.
_TABLE = re.compile(r"<!-- (?:nystrom|python) (?s:.*?)<!-- end -->|^ *\|.*$", re.MULTILINE)
_NO_WORDS = re.compile(r"`[^`]*`|\]\([^)]*\)")
# One comment: the end of a line of code, or successive lines of comments alone.
_COMMENT = re.compile(r"^[^\S\n]*(?:#|//)(.*(?:\n[^\S\n]*(?:#|//).*)*)|\s{2}#(.*)$", re.MULTILINE)


def comments() -> Iterator[tuple[str, str]]:
    for path, source in sources("py", "cpp"):
        yield from ((path, comment) for comment in comments_of(source))


def comments_of(source: str) -> Iterator[str]:
    for alone, after in _COMMENT.findall(source):
        yield re.sub(r"\s*\n[^\S\n]*(?:#|//)", " ", alone or after)


def docstrings() -> Iterator[tuple[str, str]]:
    for path, source in sources("py"):
        yield from ((path, docstring) for docstring in _DOCSTRING.findall(source))


def sources(*ends: str) -> Iterator[tuple[str, str]]:
    # "build" has copies that a wheel was made of.
    for path in (path for room in ROOMS for end in ends for path in sorted(ROOT.glob(f"{room}/**/*.{end}"))):
        if "build" in path.parts:
            continue
        yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")


def pages() -> Iterator[tuple[str, str]]:
    """Every page without its code."""
    for path in (*ROOT.glob("*.md"), *ROOT.glob("*/README.md"), *ROOT.glob("docs/**/*.md")):
        text = path.read_text(encoding="utf-8")
        # Released versions of the changelog stay as they are.
        text = text.partition("\n## 0.3.0 ")[0] if path.name == "CHANGELOG.md" else text
        yield str(path.relative_to(ROOT)), _FENCED.sub("", text)


def cells() -> Iterator[tuple[str, str]]:
    """Pages of which each cell of a table is a sentence."""
    yield from ((path, _CELL.sub("\n\n", text)) for path, text in pages())


def prose() -> Iterator[tuple[str, str]]:
    """Pages without tables, code and addresses; the changelog is a list."""
    for path, text in pages():
        if path != "CHANGELOG.md":
            yield path, _CELL.sub("\n\n", _NO_WORDS.sub("", _TABLE.sub("", text)))


BARE = r"(?:What|Of|As|Where|By|Its|That|Those)\b"
BUT = r".*\b(?i:(?:nothing|nobody|none|nowhere|anything|everything|all|no \w+|every \w+) but|but (?:for|in(?! no)))\b"
PASSIVE = r".*\b(?:is|are|was|were|be|been) (?:asked|said|told)\b(?! apart)"
PARTICIPLE = (
    r".*\b(?i:the|an?|its|their|no|each|of) "
    r"(?:asked|drawn|found|given|healed|known|learned|made|meant|said|told|wanted)"
    r"(?:[.,;:)]|$| (?:and|are|at|by|for|from|in|is|of|or|to|was|were)\b)"
)
NUMBERS = r"(?:.*?(?<![\w.,:/-])\.?\d[\d.,]*(?!\w)){4}"
RULES = {
    "the subject first": (BARE, (comments, docstrings, cells)),
    "say who acts": (PASSIVE, (comments, docstrings, cells)),
    "except, not but": (BUT, (comments, docstrings, cells)),
    "a participle is no noun": (PARTICIPLE, (comments, docstrings, cells)),
    "more than three numbers are a table": (NUMBERS, (prose,)),
}


def sentences(text: str, pattern: str) -> list[str]:
    """The sentences of a text whose beginning fits a pattern."""
    each = (" ".join(sentence.split()) for sentence in _SENTENCES.split(text))
    return [sentence for sentence in each if re.match(pattern, sentence)]


@pytest.mark.parametrize(
    ("pattern", "text", "found"),
    [
        (
            BARE,
            "Of all queries. It reads\nOf tokens.\n\nArgs:\n    x: What is read.",
            ["Of all queries.", "What is read."],
        ),
        (
            BUT,
            "No key but one. A mask, but for\nits end. Few, but at least one.",
            ["No key but one.", "A mask, but for its end."],
        ),
        (PASSIVE, "The rank is told. The rank tells. They cannot be told apart.", ["The rank is told."]),
        (PARTICIPLE, "Less than the asked. The given keys. One of\nfound.", ["Less than the asked.", "One of found."]),
        (NUMBERS, "1, 2 and 3. 1,024, .5, 6.25 and\n7. Of int8, H200, 1.2.3, 4-bit, 5.", ["1,024, .5, 6.25 and 7."]),
    ],
)
def test_a_rule_finds_what_breaks_it(pattern, text, found):
    assert sentences(text, pattern) == found


def test_comments_are_read_as_one_text():
    assert list(comments_of("x = 1  # The size\n    # One\n    # Two.\ny = 2\n// Three\n")) == [
        " The size",
        " One  Two.",
        " Three",
    ]


@pytest.mark.parametrize("rule", RULES)
def test_texts_keep_a_rule(rule):
    pattern, kinds = RULES[rule]
    found = [f"{path}: {each}" for texts in kinds for path, text in texts() for each in sentences(text, pattern)]
    assert len(found) <= MOST, "\n".join(found)
