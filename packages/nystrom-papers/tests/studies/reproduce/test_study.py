"""A study says how its setting differs from a paper's, at every size."""

from nystrom_papers.studies.reproduce.catalogue import find_study
from nystrom_papers.studies.reproduce.study import Setting


def test_a_study_that_no_paper_has_says_so_at_the_papers_size_too():
    study = find_study("slides")
    assert study.plan(Setting(size="paper")).differs == "no paper has it"
    small = study.plan(Setting()).differs
    assert small.endswith("; no paper has it")
    assert len(small) > len("; no paper has it")
