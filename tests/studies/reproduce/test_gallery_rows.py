"""The page of the studies says what the rows in results/ say."""

from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest

from nystrom.measure.rows import read_rows
from nystrom.report.markdown_gallery import tables_markdown, verdicts_markdown
from nystrom.studies.reproduce.catalogue import CATALOGUE, find_study

ROOT = Path(__file__).parents[3]
(FILE,) = (ROOT / "results").glob("reproduce-small_*.csv")
TRAINED = list((ROOT / "results").glob("reproduce-trained-small_*.csv"))


def rows_by_study():
    rows = defaultdict(list)
    for row in (row for file in (FILE, *TRAINED) for row in read_rows(file)):
        rows[row.study].append(replace(row, sizes=row.sizes.rpartition("part=")[0].strip()))
    return rows


ROWS = rows_by_study()


@pytest.mark.parametrize("name", list(ROWS))
def test_tables_and_verdicts_of_the_page_are_those_of_the_rows(name):
    section = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8").partition(f"\n## {name}\n")[2]
    section = section.partition("\n## ")[0]
    study = find_study(name)
    assert verdicts_markdown(study.verdicts(ROWS[name])) in section
    assert tables_markdown(study.tables(ROWS[name])) in section


def test_all_rows_are_of_one_clean_commit_but_for_trainings():
    commits = {CATALOGUE[name].trains: {row.commit for row in rows} for name, rows in ROWS.items()}
    assert len(commits[False]) == 1
    assert not any(commit.endswith("+dirty") for found in commits.values() for commit in found)
