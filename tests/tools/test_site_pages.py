import importlib
import importlib.util
import re

import griffe
import pytest
from markdown import Markdown

import nystrom
from nystrom.attention.registry import METHODS
from nystrom.models.configuration import EncoderConfig
from nystrom.native import Status
from tools.site_pages import ELSEWHERE, ROOT, Formulas, mark_wide, page_of, shown_objects, site_links


@pytest.mark.parametrize(
    ("source", "text", "expected"),
    [
        ("README.md", "[a](docs/gpu.md#use-it) [b](results/README.md)", "[a](gpu.md#use-it) [b](results.md)"),
        ("results/README.md", "[a](../docs/gallery.md)", "[a](gallery.md)"),
        ("docs/gpu.md", "[a](../CONTRIBUTING.md) ![p](long-inputs.png)", "[a](contributing.md) ![p](long-inputs.png)"),
        ("docs/methods/nystrom.md", "[a](../gpu.md) [b](../../README.md)", "[a](../gpu.md) [b](../index.md)"),
        # Not on the site.
        ("README.md", "see [CITATION.cff](CITATION.cff).", "see CITATION.cff."),
        ("README.md", "[paper](https://arxiv.org/abs/2102.03902) [below](#more)", None),
        ("README.md", "```\n[a](docs/gpu.md) $x$\n```\n`$y$ [a](b.md)`", None),
    ],
)
def test_links_of_the_repository_become_links_of_the_site(source, text, expected):
    assert site_links(text, source) == (text if expected is None else expected)


def test_a_link_to_nothing_is_named():
    with pytest.raises(ValueError, match=r"links to docs/none\.md"):
        site_links("[a](none.md)", "docs/gpu.md")


def test_plain_forms_show_their_source_and_modules_no_heading():
    page = "::: nystrom.reference.linear\n\n::: nystrom.attention.methods.linear\n    options: {members: [a, b]}\n"
    bare = "show_root_heading: false, show_root_toc_entry: false}"
    plain, module = shown_objects(page).split("\n\n")
    assert plain.splitlines()[1] == f"    options: {{show_source: true, {bare}"
    assert module.splitlines()[1] == f"    options: {{members: [a, b], {bare}"


def test_wide_figures_are_marked_and_narrow_ones_fit_a_phone():
    page = '<p><img alt="a" src="{}" /> and <img src="https://a.org/b.png"></p>'
    wide, narrow = (mark_wide(page.format(name), "docs") for name in ("efficiency.png", "long-inputs.png"))
    assert wide == page.format('efficiency.png" class="wide')
    assert narrow == page.format("long-inputs.png")


def test_every_public_class_shows_how_it_is_called():
    extensions = griffe.load_extensions(str(ROOT / "tools" / "call_lines.py"))
    package = griffe.load("nystrom", search_paths=[ROOT / "packages" / "nystrom" / "src"], extensions=extensions)
    names = (ROOT / "tests" / "public_names.txt").read_text(encoding="utf-8").split()
    shown = [package[name.removeprefix("nystrom.")] for name in names]
    assert [each.path for each in shown if each.is_class and "__init__" not in each.all_members] == []
    for path, fields in (
        ("native.Status", Status._fields),
        ("models.configuration.EncoderConfig", EncoderConfig.__annotations__),
    ):
        assert [each.name for each in package[path].parameters] == ["self", *fields]


def test_formulas_become_mathml():
    page = Markdown(extensions=["fenced_code", Formulas()])
    html = page.convert("with $m_1 * n$ and `$y$`:\n\n$$a_1\n= b_2$$\n\n```\n$z$\n```\n")
    assert html.count("<math ") == 2
    assert html.count('display="block"') == 1
    assert "<em>" not in html
    assert [part for part in ("$y$", "$z$") if part in html] == ["$y$", "$z$"]
    assert html.count("$") == 4


def test_the_pages_from_elsewhere_are_there():
    assert [page_of(source) for source in ELSEWHERE] == list(ELSEWHERE.values())


def documented():
    """Every object that a page of docs documents, by the path that its page names."""
    found = []
    for page in sorted((ROOT / "docs").rglob("*.md")):
        for path, options in re.findall(
            r"^::: ([\w.]+)\n((?:    .*\n)*)", page.read_text(encoding="utf-8"), re.MULTILINE
        ):
            members = re.search(r"members: \[(.*?)\]", options)
            if importlib.util.find_spec(path.rsplit(".", 1)[0]) and members:
                module = importlib.import_module(path)
                found += [getattr(module, name.strip()) for name in members[1].split(",")]
            else:
                module, name = path.rsplit(".", 1)
                found.append(getattr(importlib.import_module(module), name))
    return found


def test_every_public_name_is_documented_once():
    pages = documented()
    for package in ("", ".integrations", ".models", ".inspection", ".parallel", ".linalg"):
        module = importlib.import_module(f"nystrom{package}")
        for name in module.__all__:
            assert sum(each is getattr(module, name) for each in pages) == 1, f"{module.__name__}.{name}"


def test_every_function_is_under_api():
    page = (ROOT / "docs" / "api" / "functions.md").read_text(encoding="utf-8")
    for name in METHODS:
        function, module = getattr(nystrom, f"{name}_attention"), f"nystrom.attention.methods.{name}"
        assert f"(../methods/{name}.md#{module}.{function.__name__})" in page
        assert f"(../methods/{name}.md#nystrom.attention.options.{METHODS[name].options.__name__})" in page


def test_no_two_pages_have_one_title():
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    named = re.findall(r"^ +- (.+): \S+\.md$", settings.partition("\nnav:\n")[2], re.MULTILINE)
    headings = [
        re.search(r"^# (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)[1]  # pyright: ignore[reportOptionalSubscript]
        for page in (ROOT / "docs").rglob("*.md")
    ]
    for titles in (named, headings):
        assert len(titles) > 50
        assert sorted(set(titles)) == sorted(titles)


def test_a_class_shows_how_it_is_called():
    assert "            merge_init_into_class: true\n" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
