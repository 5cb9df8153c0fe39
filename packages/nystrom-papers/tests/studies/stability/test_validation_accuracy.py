"""Fig. 2 of Skyformer from curves of runs, and its rules on curves made by hand."""

import math

import pytest

from nystrom_lab.measure.rows import Row
from nystrom_papers.report.lra.curves import GATHERED
from nystrom_papers.studies.reproduce.run import check_study, run_study
from nystrom_papers.studies.reproduce.study import Setting
from nystrom_papers.studies.stability.validation_accuracy import STUDIES, find_limit

STUDY = STUDIES["skyformer-figure-2"]
# Around the limit, within a point of it; the mean and both halves are the limit itself.
NOISE = (0.002, -0.002, -0.002, 0.002)


def curve(level, *, after=4, second=1.0, start=0.5):
    """Sixteen evaluations, a hundred steps apart, that come to a level after some of them."""
    values = [start] * after + [level + NOISE[place % 4] for place in range(16 - after)]
    return {100 * (place + 1): (second * (place + 1), value) for place, value in enumerate(values)}


def rows(method, curves, *, task="text"):
    return [
        Row(
            study="", quantity="validation accuracy", method=method, value=value, unit="", seed=seed, device="d",
            facts={"task": task, "preset": "demo", "step": step, "seconds": seconds},
        )
        for seed, points in enumerate(curves)
        for step, (seconds, value) in points.items()
    ]  # fmt: skip


def decided(softmax, kernelized, skyformer):
    made = [*rows("softmax", softmax), *rows("kernelized", kernelized), *rows("skyformer-128", skyformer)]
    return [verdict.agrees for verdict in STUDY.verdicts(made)]


def seeds(level=0.7, *, after=4, second=1.0, spread=0.0):
    return [curve(level + shift * spread, after=after, second=second) for shift in (-1, 0, 1)]


def test_the_limit_is_the_mean_of_the_last_quarter_and_is_reached_within_two_deviations():
    limit = find_limit(curve(0.7, after=5, second=2.0))
    assert limit is not None
    assert limit.accuracy == pytest.approx(0.7)
    # The four deviate by .002, whose standard deviation is sqrt(4/3) of it.
    assert limit.noise == pytest.approx(0.002 * math.sqrt(4 / 3))
    assert (limit.steps, limit.seconds, limit.every) == (600, 12.0, (100.0, 2.0))


def test_a_run_that_rises_is_short_or_is_not_finite_has_no_limit():
    rising = {step: (1.0 * step, 0.5 + 0.001 * step) for step in range(100, 1700, 100)}
    assert find_limit(rising) is None
    flat = curve(0.7)
    assert find_limit(dict(list(flat.items())[:11])) is None
    assert find_limit({**flat, 400: (4.0, math.nan)}) is None


def test_claims_agree_where_softmax_is_later_wider_and_slower_and_are_refused_where_it_is_not():
    late, early = seeds(after=9, second=3.0, spread=0.01), seeds(spread=0.001)
    assert decided(late, early, early) == [True, True, True]
    assert decided(early, late, late) == [False, False, False]
    assert decided(late, late, late) == [None, None, None]


@pytest.mark.parametrize(
    "softmax",
    [seeds(after=9)[:2], seeds(0.52, after=9), [*seeds(after=9)[:2], dict(list(curve(0.7, after=9).items())[:12])]],
    ids=["two seeds", "not learned", "other steps"],
)
def test_a_baseline_that_has_not_learned_to_the_end_in_three_seeds_decides_nothing(softmax):
    assert decided(softmax, *[seeds(spread=0.001)] * 2) == [None, None, None]


def test_what_tells_the_largest_class_of_listops_has_not_learned():
    made = []
    for method, after in (("softmax", 9), ("kernelized", 4), ("skyformer", 4)):
        made += rows(method, [curve(0.18, after=after, start=0.16)] * 3, task="listops")
    assert [verdict.agrees for verdict in STUDY.verdicts(made)] == [None] * 3
    assert {line[-1] for line in STUDY.tables(made)[0].lines} == {"not learned"}


def test_a_lower_limit_is_no_faster_way_and_refuses_comparable_accuracy():
    low = seeds(0.6, spread=0.001)
    assert decided(seeds(after=9, spread=0.001), low, low) == [None, None, False]


def test_a_file_of_gathered_curves_is_drawn_over_seconds_and_steps(tmp_path):
    lines = [
        f"text-{method}-demo-seed{seed},{step},validation accuracy,{value!r},{seconds:g}"
        for method in ("softmax", "skyformer-128")
        for seed, points in enumerate(seeds())
        for step, (seconds, value) in points.items()
    ]
    file = tmp_path / "curves.csv"
    file.write_text("\n".join([",".join(GATHERED), *lines]) + "\n")
    summary = run_study(check_study("skyformer-figure-2", Setting(runs=file), tmp_path), lambda line: None)
    assert summary.figures == ["skyformer-figure-2.png", "skyformer-figure-2-steps.png"]
    assert [line[:6] for line in summary.tables[0].lines] == [
        [method, "3", "1,600", "16", "70.0 ± 0.0", "500"] for method in ("softmax", "skyformer-128")
    ]
    with pytest.raises(ValueError, match="needs three runs with the preset skyformer of softmax on listops"):
        STUDY.plan(Setting(runs=file, size="paper"))


def test_without_runs_it_says_what_it_reads():
    with pytest.raises(ValueError, match="curves --gather"):
        STUDY.plan(Setting())
