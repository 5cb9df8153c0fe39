from pathlib import Path

import torch

from nystrom_lab.measure.rows import Row
from nystrom_papers.studies.fidelity.front import STUDIES, build, cut_to_rank
from nystrom_papers.studies.reproduce.encoders import Recording

STUDY = STUDIES["near-far"]
ERROR, TIME, RATIO = "relative error of the output", "forward time", "forward time / exact"


def row(quantity, method, n, value, part=0.0):
    """A row whose quartiles are a part of its value away."""
    return Row(study="", quantity=quantity, method=method, value=value, unit="", n=n, device="a CPU", repeats=16,
                   low=value * (1 - part), high=value * (1 + part))  # fmt: skip


def rows_of(errors, times, lengths=(512, 1024), part=0.0):
    rows = [row(ERROR, name, n, value, part) for n in lengths for name, value in errors.items()]
    for n in lengths:
        for name, value in times.items():
            rows += [row(TIME, name, n, value, part), row(RATIO, name, n, value / times["softmax"], part)]
    return rows


ERRORS = {"near_far": 0.107, "near_far-128": 0.057, "nystrom-256": 0.277, "nystrom-64": 0.43, "rank 64": 0.16}
TIMES = {"softmax": 20.0, "near_far": 5.0, "near_far-128": 9.0, "nystrom-256": 8.0, "nystrom-64": 2.0}


def test_each_claim_is_decided_by_its_rule():
    assert [verdict.agrees for verdict in STUDY.verdicts(rows_of(ERRORS, TIMES))] == [True] * 5
    worse = {"near_far": 0.17, "near_far-128": 0.07, "nystrom-256": 0.30, "rank 64": 0.16}
    slower = TIMES | {"near_far": 21.0}
    assert [verdict.agrees for verdict in STUDY.verdicts(rows_of(worse, slower))] == [False] * 5
    # Two standard errors are 0.74 of a distance of the quartiles, for 16 values.
    near = {"near_far": 0.114, "near_far-128": 0.064, "nystrom-256": 0.230, "rank 64": 0.115}
    close = TIMES | {"near_far": 19.0, "nystrom-256": 19.5}
    assert [verdict.agrees for verdict in STUDY.verdicts(rows_of(near, close, part=0.1))] == [None] * 5
    # Half the error in more time is not enough.
    assert STUDY.verdicts(rows_of(ERRORS, TIMES | {"nystrom-256": 4.0}))[2].agrees is False


def test_the_table_at_equal_time_has_the_nearest_of_each_family():
    whole, equal = STUDY.tables(rows_of(ERRORS, TIMES, (512,)))
    assert equal.lines == [["512", "near_far", "5.0", "0.107"], ["512", "nystrom-64", "2.0", "0.430"]]
    assert whole.lines[0] == ["near_far", "0.107 / 0.25"]
    [figure] = STUDY.figures(rows_of(ERRORS, TIMES), Path()).values()
    assert [axes.get_title() for axes in figure.axes] == ["n = 512", "n = 1024"]


def test_the_best_of_full_rank_is_exact_and_methods_are_built_by_their_names():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        given = Recording(*torch.randn(3, 1, 2, 96, 8))
    exact = build("softmax", given)(*given)
    torch.testing.assert_close(cut_to_rank(given, 96), exact)
    assert (cut_to_rank(given, 8) - exact).norm() > (cut_to_rank(given, 32) - exact).norm() > 0
    # With as many landmarks as tokens Nyström attention is exact.
    torch.testing.assert_close(build("nystrom-96", given)(*given), exact)
