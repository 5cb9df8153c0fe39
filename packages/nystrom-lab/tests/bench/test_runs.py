"""Medians over runs, and ratios taken within a run."""

import math
from dataclasses import replace

import pytest

from nystrom_lab.bench.runs import run_runs, summary
from nystrom_lab.measure.rows import new_row, read_rows


def run_of(slow, fast):
    values = {"authors-2+skip": slow, "nystrom-2+skip": fast}
    return [
        new_row(
            study="efficiency", quantity="forward time", method=method, value=value, unit="ms", device="a CPU", n=16,
            facts={"layout": "heads"}, seed=0, command="c",
        )
        for method, value in values.items()
    ]  # fmt: skip


def test_a_ratio_is_the_median_of_the_runs_ratios():
    """The slow second run changes neither: the median of the ratios is not the ratio of the medians."""
    rows = summary([run_of(2.0, 1.0), run_of(90.0, 30.0), run_of(8.0, 2.0)], "nystrom bench runs", 3)
    values = {(row.method, row.quantity): (row.value, row.low, row.high) for row in rows}
    assert values == {
        ("authors-2+skip", "forward time"): (8.0, 5.0, 49.0),
        ("nystrom-2+skip", "forward time"): (2.0, 1.5, 16.0),
        ("nystrom-2+skip", "forward time: times less than authors-2+skip"): (3.0, 2.5, 3.5),
    }
    assert {row.repeats for row in rows} == {3}
    assert {row.seed for row in rows} == {3}


@pytest.mark.parametrize("place", [0, 2])
def test_what_one_run_did_not_measure_has_no_value_and_says_why(place):
    runs = [run_of(2.0, 1.0) for _ in range(3)]
    runs[place][1] = replace(runs[place][1], value=math.nan, note="needs about 9 GB")
    for row in summary(runs, "nystrom bench runs", 0):
        if row.method == "nystrom-2+skip":
            assert math.isnan(row.value)
            assert (row.low, row.high, row.repeats) == (None, None, 2)
            assert row.note == f"run {place + 1} of 3: needs about 9 GB"
        else:
            assert (row.value, row.repeats, row.note) == (2.0, 3, "")
    runs[1][0] = replace(runs[1][0], value=math.nan, note="other")
    notes = {row.quantity: row.note for row in summary(runs, "nystrom bench runs", 0) if row.method == "authors-2+skip"}
    assert notes == {"forward time": "run 2 of 3: other"}


@pytest.mark.slow
def test_runs_are_kept_and_their_summary_is_written(tmp_path):
    asked = {"lengths": (16,), "methods": ("authors-2", "nystrom-2"), "layouts": ("heads",), "repeats": 1}
    run_runs(**asked, runs=1, to=tmp_path)
    kept = (tmp_path / "heads-0" / "efficiency.csv").read_bytes()
    with pytest.raises(ValueError, match=r"runs\.csv holds rows of another setting: command is .*--runs 1 .*move that"):
        run_runs(**asked, runs=2, to=tmp_path)
    (tmp_path / "runs.csv").rename(tmp_path / "one.csv")
    rows = run_runs(**asked, runs=2, to=tmp_path)
    assert (tmp_path / "heads-0" / "efficiency.csv").read_bytes() == kept
    assert read_rows(tmp_path / "runs.csv") == rows
    assert all("--runs 2" in row.command and row.repeats == 2 for row in rows)


def test_a_run_that_fails_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"a run failed: .*nystorm"):
        run_runs(methods=("nystorm-2",), runs=1, to=tmp_path)
