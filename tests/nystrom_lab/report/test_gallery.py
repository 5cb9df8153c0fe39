import base64
import re

import pytest

from nystrom_lab.report.catalogue import StudyLine, catalogue_text
from nystrom_lab.report.gallery import print_summary, print_verdicts, write_gallery
from nystrom_lab.report.summary import Summary, Verdict, write_summary
from nystrom_lab.report.table import Table

# One white pixel.
PICTURE = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8/5+hHgAHggJ/PchI7wAAAABJRU5ErkJggg=="
)


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "bounds-small"
    folder.mkdir()
    (folder / "bounds.png").write_bytes(PICTURE)
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
        ],
        figures=["bounds.png"],
        rows=3,
        provenance="float32, a processor",
        command="nystrom reproduce bounds",
        minutes=0.5,
    )


def test_the_page_holds_its_pictures_tables_verdicts_and_what_was_not_run(folder, tmp_path):
    page = tmp_path / "index.html"
    write_gallery({"bounds": folder, "later": tmp_path / "later-small"}, {"blog": "needs --model"}, page)
    text = page.read_text()
    assert base64.b64encode(PICTURE).decode() in text
    assert not re.search(r'(src|href)="(?!data:|#)', text)
    assert "1 agree with what was measured, 1 do not, and for 1 the rows cannot tell" in text
    for words in ("a &lt;tiny&gt; one", "the bound &amp; the error", "The bound", "needs --model", "0.50", "one head"):
        assert words in text


def test_the_summary_is_printed_with_its_words(folder, capsys):
    print_summary(summary(), folder)
    printed = capsys.readouterr().out
    for words in ("Errors fall. Agrees: from 2 to 1.", "Does not agree", "Cannot tell", "nystrom", "bounds.png"):
        assert words in printed


def test_all_claims_are_printed_as_one_table(capsys):
    print_verdicts([summary(), summary()])
    printed = capsys.readouterr().out
    assert [line.split()[0] for line in printed.splitlines() if "Errors" in line] == ["bounds"] * 6
    assert [printed.count(word) for word in ("agrees", "does not agree", "cannot tell")] == [2, 2, 2]
    assert printed.endswith("6 claims: 2 agree, 2 do not, 2 unknown.\n")


def test_the_list_fits_the_terminal():
    line = StudyLine("bounds", "the bound beside the error " * 5, "a paper", "a model", "a GPU", "2", "small")
    text = catalogue_text([line, line], 60)
    assert max(map(len, text.splitlines())) <= 60
    assert "needs a model; --size paper: a GPU" in text
    assert "small; about 2 min on one thread" in text
