"""The page of the studies says what the rows in results/ say."""

from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest

from nystrom_lab.measure.rows import read_rows
from nystrom_papers.report.gallery import counts, refused_claims, tables_markdown
from nystrom_papers.report.summary import provenance_of, read_summary
from nystrom_papers.studies.reproduce.catalogue import CATALOGUE, find_study
from tools.gather_gallery import write_page

ROOT = Path(__file__).parents[5]
FILES = sorted((ROOT / "results" / "gallery").glob("*.csv"))


def rows_by_study():
    rows = defaultdict(list)
    for row in (row for file in FILES for row in read_rows(file)):
        rows[row.study].append(row.with_facts(part=None))
    return rows


ROWS = rows_by_study()


@pytest.mark.parametrize("name", list(ROWS))
def test_tables_and_verdicts_of_the_page_are_those_of_the_rows(name):
    study, kept = find_study(name), read_summary(ROOT / "docs" / "gallery", f"{name}.json")
    assert kept is not None
    assert tables_markdown(kept.tables) == tables_markdown(study.tables(ROWS[name]))
    verdicts = list(study.verdicts(ROWS[name]))
    assert kept.verdicts == verdicts
    lines = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8").splitlines()
    [line] = [line for line in lines if line.startswith(f"| [{name}](")]
    measured = replace(kept, verdicts=verdicts)
    assert line.endswith(f" | {' | '.join(counts(measured))} |")
    assert [line for line in lines if line.startswith(f"- {name}: ")] == [
        f"- {name}: {claim}" for claim in refused_claims(measured)
    ]


# Pictures of matrices, of which no file of rows holds the numbers.
PICTURES = {f"nystromformer-figure-{n}" for n in "23"} | {f"supplement-figure-{n}" for n in "1234"}


@pytest.mark.parametrize("name", [name for name in ROWS if name not in PICTURES | {"skyformer-appendix-f"}])
def test_the_figures_of_the_page_are_drawn_from_the_rows(name, tmp_path):
    drawn = [f"{name}{'-' if which else ''}{which}.png" for which in find_study(name).figures(ROWS[name], tmp_path)]
    kept = read_summary(ROOT / "docs" / "gallery", f"{name}.json")
    assert kept is not None
    assert drawn == kept.figures


def test_the_rows_of_a_study_are_of_one_clean_commit_but_for_trainings():
    for name, rows in ROWS.items():
        commits = {row.commit for row in rows}
        assert not any(commit.endswith("+dirty") for commit in commits), name
        assert len(commits) == 1 or CATALOGUE[name].trains, name


def test_the_page_is_that_of_its_summaries(tmp_path):
    docs, pictures = ROOT / "docs", ROOT / "docs" / "gallery"
    (tmp_path / "gallery").symlink_to(pictures)
    write_page(tmp_path)
    assert (tmp_path / "gallery.md").read_text(encoding="utf-8") == (docs / "gallery.md").read_text(encoding="utf-8")
    assert {file.stem for file in pictures.glob("*.json")} == set(ROWS)


@pytest.mark.parametrize("name", list(ROWS))
def test_the_page_says_the_devices_precisions_commits_and_dates_of_the_rows(name):
    summary = read_summary(ROOT / "docs" / "gallery", f"{name}.json")
    assert summary is not None
    assert (summary.rows, summary.provenance) == (len(ROWS[name]), provenance_of(ROWS[name]))
    assert (summary.shows, summary.source) == (CATALOGUE[name].shows, CATALOGUE[name].source)


def test_what_stands_under_the_papers_names_and_is_not_theirs_is_said_to_be_ours():
    ours = {name: [v.claim for v in find_study(name).verdicts(rows) if v.ours] for name, rows in ROWS.items()}
    refused = {
        name for name, rows in ROWS.items() for v in find_study(name).verdicts(rows) if v.ours and v.agrees is False
    }
    assert refused == {"skyformer-table-2", "skyformer-figure-1", "inversion"}
    for name, claims in ours.items():
        assert all("fused exact attention" in claim for claim in claims if name.endswith(("table-1", "table-2")))
