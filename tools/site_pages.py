"""Pages of the site that stand elsewhere in the repository: README is the first, and the changelog, ... follow.

A hook of mkdocs. Links between pages are those of the repository, so that they also work where its files are browsed;
here they are turned into links of the site. A link to a file that is no page of the site becomes its plain name.
Formulas between dollars, in pages and in docstrings, become MathML, which browsers draw without a script.
"""

import posixpath
import re
from pathlib import Path

from latex2mathml.converter import convert
from markdown import Markdown
from markdown.extensions import Extension
from markdown.inlinepatterns import InlineProcessor
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
# Pages of the site, by their files.
ELSEWHERE = {
    "README.md": "index.md",
    # A README of a folder would be its index, in place of the first page.
    "docs/README.md": "pages.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "results/README.md": "results.md",
    "examples/README.md": "examples.md",
}
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#:\s]+)(#[^)\s]*)?\)")
_PICTURE = re.compile(r'<img [^>]*?src="([^":]+\.png)"')
_PLAIN = re.compile(r"^::: nystrom\.reference\.\w+$", re.MULTILINE)
_MEMBERS = re.compile(r"^    options: \{(members: \[.*\])\}$", re.MULTILINE)
_CODE = re.compile(r"^```.*?^```|`[^`\n]+`", re.DOTALL | re.MULTILINE)


class Formulas(Extension):
    """Markdown with formulas: $inline$, and $$in a line of its own$$."""

    def extendMarkdown(self, md: Markdown) -> None:
        """Read formulas after code and before all else, whose signs they may have."""
        md.inlinePatterns.register(_Formula(r"\$\$([^$]+)\$\$", md, display=True), "formula-block", 187)
        md.inlinePatterns.register(_Formula(r"\$([^$\n]+)\$", md, display=False), "formula", 186)


class _Formula(InlineProcessor):
    def __init__(self, pattern: str, md: Markdown, *, display: bool) -> None:
        super().__init__(pattern, md)
        self.display = display

    def handleMatch(self, m: re.Match[str], data: str) -> tuple[str, int, int]:
        """The formula as MathML, which nothing reads again."""
        formula = convert(m[1].strip().replace("\n", " "), display="block" if self.display else "inline")
        html = f'<span class="formula">{formula}</span>' if self.display else formula
        return self.md.htmlStash.store(html), m.start(0), m.end(0)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Let pages and docstrings have formulas."""
    config.markdown_extensions.append(Formulas())  # pyright: ignore[reportArgumentType]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that stand outside of docs."""
    for source, page in ELSEWHERE.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=site_links(text, source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn the links of a page in docs into those of the site, and say how its objects are shown."""
    source = page.file.src_uri
    return markdown if source in ELSEWHERE.values() else site_links(shown_objects(markdown), f"docs/{source}")


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Mark the figures that are too wide for a phone, which scroll there."""
    return mark_wide(html, posixpath.dirname(f"docs/{page.file.src_uri}"))


def mark_wide(html: str, folder: str) -> str:
    """A page with the class "wide" in each picture of more than 700 pixels: two panels side by side and more."""

    def mark(found: re.Match[str]) -> str:
        # The width of a PNG stands behind its signature and the name of its first chunk.
        width = int.from_bytes((ROOT / folder / found[1]).read_bytes()[16:20])
        return f'{found[0]} class="wide"' if width > 700 else found[0]

    return _PICTURE.sub(mark, html)


def shown_objects(text: str) -> str:
    """A page whose plain forms show their source, and whose modules with members have no heading of their own."""
    bare = "show_root_heading: false, show_root_toc_entry: false"
    text = _PLAIN.sub(rf"\g<0>\n    options: {{show_source: true, {bare}}}", text)
    return _MEMBERS.sub(rf"    options: {{\1, {bare}}}", text)


def site_links(text: str, source: str) -> str:
    """The text of a file of the repository with its links as they are on the site.

    Args:
        text: Markdown.
        source: The file, from the root of the repository.

    Raises:
        ValueError: A link to a file that is not there.
    """
    place = posixpath.dirname(page_of(source) or "")

    def link(found: re.Match[str]) -> str:
        picture, words, target, anchor = found.groups(default="")
        page = page_of(posixpath.normpath(posixpath.join(posixpath.dirname(source), target)))
        return words if page is None else f"{picture}[{words}]({posixpath.relpath(page, place or '.')}{anchor})"

    parts, end = [], 0
    for code in _CODE.finditer(text):
        parts += [_LINK.sub(link, text[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, _LINK.sub(link, text[end:])])


def page_of(file: str) -> str | None:
    """The place of a file of the repository on the site; None if it is not there.

    Raises:
        ValueError: There is no such file.
    """
    if not (ROOT / file).exists():
        raise ValueError(f"a page links to {file}, which is not in the repository.")
    if file in ELSEWHERE:
        return ELSEWHERE[file]
    return file.removeprefix("docs/") if file.startswith("docs/") else None
