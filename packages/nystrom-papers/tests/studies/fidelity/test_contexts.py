"""The study of contexts: its rules, and its rows on a small model."""

from dataclasses import replace

import pytest

from nystrom_lab.measure.rows import Row, read_rows
from nystrom_papers.studies.fidelity import contexts
from nystrom_papers.studies.fidelity.contexts import EACH, ENTRIES, ERROR, EXACT, OURS, SPREAD, STUDIES, TIME, sizes_of
from nystrom_papers.studies.reproduce.run import check_study, run_study

NAME = "near-far-context"
STUDY = STUDIES[NAME]


def test_a_context_is_nearer_the_more_it_keeps(tiny_setting, prose, tmp_path, monkeypatch):
    for name, value in (("LENGTH", 256), ("ROUNDS", {"small": 1}), ("QUESTIONS", 2), ("ENTRIES", (24, 48, 256))):
        monkeypatch.setattr(contexts, name, value)
    (tmp_path / "long.txt").write_text(prose.read_text() * 4)
    run_study(check_study(NAME, replace(tiny_setting, texts=(tmp_path / "long.txt",)), tmp_path), lambda line: None)
    rows = read_rows(tmp_path / f"{NAME}-small" / "rows.csv")
    errors = {(row.method, row.m): row.value for row in rows if row.quantity == ERROR}
    assert errors[SPREAD, 256] == 0
    assert errors[OURS, 24] > errors[OURS, 48] > errors[OURS, 256]
    assert {row.method for row in rows if row.quantity == TIME} == {OURS, EACH, EXACT}
    near, time = STUDY.tables(rows)
    assert (len(near.lines), len(time.lines)) == (3, 3)
    assert all(cell for line in (*near.lines, *time.lines) for cell in line)


def test_all_entries_are_heavy_or_clusters():
    assert all(sum(sizes_of(entries).values()) == entries for entries in ENTRIES)


def row(quantity, method, value, m=192, part=0.0):
    """A row whose quartiles are a part of its value away."""
    return Row(study="", quantity=quantity, method=method, value=value, unit="", n=2048, m=m, device="a CPU",
                   repeats=16, low=value * (1 - part), high=value * (1 + part))  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ([], ["agrees", "agrees"]),
        ([row(ERROR, OURS, 0.2, 768)], ["does not agree", "agrees"]),
        ([row(TIME, OURS, 20, 768)], ["agrees", "does not agree"]),
        # The limit is within the errors.
        ([row(ERROR, OURS, 0.14, 768, 0.2)], ["cannot tell", "agrees"]),
        ([row(TIME, OURS, 14.5, 768, 0.05)], ["agrees", "cannot tell"]),
    ],
)
def test_each_claim_is_decided_by_its_rule(changed, words):
    rows = [row(ERROR, OURS, 0.2), row(ERROR, SPREAD, 0.6), row(TIME, OURS, 2), row(TIME, EACH, 100)]
    rows += [row(ERROR, SPREAD, 0.3, 768), row(TIME, EACH, 150, 768)]
    assert [verdict.word for verdict in STUDY.verdicts([*rows, *changed])] == words
    assert [verdict.word for verdict in STUDY.verdicts(changed and rows[1:2])] == ["cannot tell"] * 2
