"""The page of the studies says what the rows in results/ say."""

from collections import defaultdict
from pathlib import Path

import pytest

from nystrom_lab.measure.rows import read_rows
from nystrom_lab.report.markdown_gallery import tables_markdown, verdicts_markdown
from nystrom_lab.report.summary import provenance_of, read_summary
from nystrom_lab.studies.reproduce.catalogue import CATALOGUE, find_study
from tools.gather_gallery import write_page

ROOT = Path(__file__).parents[4]
FILES = [
    file for kind in ("small", "trained-small") for file in sorted((ROOT / "results").glob(f"reproduce-{kind}_*.csv"))
]


def rows_by_study():
    rows = defaultdict(list)
    for row in (row for file in FILES for row in read_rows(file)):
        rows[row.study].append(row.with_facts(part=None))
    return rows


ROWS = rows_by_study()


@pytest.mark.parametrize("name", list(ROWS))
def test_tables_and_verdicts_of_the_page_are_those_of_the_rows(name):
    study = find_study(name)
    for page, told in (
        ("gallery.md", verdicts_markdown(study.verdicts(ROWS[name]))),
        ("gallery-tables.md", tables_markdown(study.tables(ROWS[name]))),
    ):
        section = (ROOT / "docs" / page).read_text(encoding="utf-8").partition(f"\n## {name}\n")[2]
        assert told in section.partition("\n## ")[0]


def test_the_rows_of_a_study_are_of_one_clean_commit_but_for_trainings():
    for name, rows in ROWS.items():
        commits = {row.commit for row in rows}
        assert not any(commit.endswith("+dirty") for commit in commits), name
        assert len(commits) == 1 or CATALOGUE[name].trains, name


def test_the_page_is_that_of_its_summaries(tmp_path):
    docs, pictures = ROOT / "docs", ROOT / "docs" / "gallery"
    (tmp_path / "gallery").symlink_to(pictures)
    write_page(tmp_path)
    for page in ("gallery.md", "gallery-tables.md"):
        assert (tmp_path / page).read_text(encoding="utf-8") == (docs / page).read_text(encoding="utf-8")
    assert {file.stem for file in pictures.glob("*.json")} == set(ROWS)


@pytest.mark.parametrize("name", list(ROWS))
def test_the_page_says_the_devices_precisions_commits_and_dates_of_the_rows(name):
    summary = read_summary(ROOT / "docs" / "gallery", f"{name}.json")
    assert summary is not None
    assert (summary.rows, summary.provenance) == (len(ROWS[name]), provenance_of(ROWS[name]))
