from dataclasses import replace

import pytest

from nystrom_lab.report.table import Table
from nystrom_papers.report.gallery import gallery_markdown, print_summary, print_verdicts, write_gallery
from nystrom_papers.report.summary import Summary, Verdict, write_summary

COUNTED = (
    "The papers make 3 claims: 1 agree with the rows, 1 do not, and the rows cannot tell 1. This library's pages make "
    "1 claims: 0 agree with the rows, 1 do not, and the rows cannot tell 0."
)


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "bounds-small"
    folder.mkdir()
    write_summary(summary(), folder)
    return folder


def summary():
    return Summary(
        name="bounds",
        shows="the bound & the error",
        source="Proposition 1",
        size="small",
        setting={"model": "a <tiny> one"},
        differs="one head",
        tables=[Table("errors", ["method", "m=4"], [["nystrom", "0.50"]])],
        verdicts=[
            Verdict("Errors fall.", True, "from 2 to 1."),
            Verdict("Errors vanish.", False, "1 is left."),
            Verdict("Errors are small.", None, "one row."),
            Verdict("Errors of the fused form vanish.", False, "2 are left.", ours=True),
        ],
        figures=["bounds.png"],
        rows=3,
        provenance="float32, a processor",
        command="nystrom reproduce bounds",
        minutes=0.5,
    )


def test_the_page_holds_its_pictures_tables_verdicts_and_what_was_not_run(folder, tmp_path):
    page = tmp_path / "index.md"
    for _ in range(2):
        write_gallery({"bounds": folder, "later": tmp_path / "later-small"}, {"blog": "needs --model"}, page)
    text = page.read_text()
    assert COUNTED in text
    assert "![the bound & the error](bounds-small/bounds.png)" in text
    assert "| Ours: Errors of the fused form vanish. | **does not agree** | 2 are left. |" in text
    assert "- `blog`: needs --model" in text
    for words in ("model a <tiny> one", "The bound & the error", "| nystrom | 0.50 |", "one head", "float32"):
        assert words in text
    page.write_text("mine\n")
    with pytest.raises(ValueError, match="is not a page of nystrom reproduce"):
        write_gallery({"bounds": folder}, {}, page)


def test_the_summary_is_printed_with_its_words(folder, capsys):
    print_summary(summary(), folder)
    printed = capsys.readouterr().out
    claims = ("Errors fall. Agrees: from 2 to 1.", "Of this library: Errors of the fused form vanish. Does not")
    assert all(words in printed for words in (*claims, "Does not agree", "Cannot tell", "nystrom", "bounds.png"))


def test_all_claims_are_printed_as_one_table(capsys):
    print_verdicts([summary(), summary()])
    printed = capsys.readouterr().out
    found = [line.split()[:2] for line in printed.splitlines() if "Errors" in line]
    assert found == [*[["bounds", "paper"]] * 3, ["bounds", "ours"]] * 2
    assert printed.endswith(
        "The papers make 6 claims: 2 agree with the rows, 2 do not, and the rows cannot tell 2. This library's pages "
        "make 2 claims: 0 agree with the rows, 2 do not, and the rows cannot tell 0.\n"
    )


def test_the_page_counts_and_shows_the_claims_of_this_library_apart():
    own = replace(summary(), name="own", source="this library")
    two = replace(summary(), figures=["bounds.png", "bounds-2.png"])
    page = gallery_markdown([two, own], {"blog": "needs --model"}, pictures="gallery", results="results")
    assert "| the papers | 1 | 1 | 1 |\n| this library's pages | 1 | 3 | 1 |\n" in page
    papers, ours = page.split("## This library")
    figures = "[bounds](gallery/bounds.png), [2](gallery/bounds-2.png)"
    assert "\n## Proposition 1\n" in papers
    assert f"\n| {figures} | the bound & the error | one head | 1 | 2 | 1 |\n" in papers
    assert "\n| [own](gallery/bounds.png) | the bound & the error | 1 | 2 | 1 |\n" in ours
    for section, name, whose in ((papers, "bounds", "Ours: "), (ours, "own", "")):
        assert f"\n- {name}: Errors vanish.\n- {name}: {whose}Errors of the fused form vanish.\n" in section
        assert "Errors fall." not in section
    assert "Ours:" not in ours
    assert "- `blog`: needs --model" in page
