import math

import pytest

from nystrom_lab.measure.rows import new_row
from nystrom_lab.studies.reproduce.run import check_study, run_study
from nystrom_lab.studies.reproduce.study import Setting
from nystrom_lab.studies.stability.validation_loss import STUDIES
from nystrom_lab.training.train import train

STUDY = STUDIES["skyformer-appendix-a"]


def curve(method, *points, seed=0):
    """Rows of (step, seconds, loss)."""
    return [
        new_row(study="", quantity="validation loss", method=method, value=loss, unit="", device="cpu", seed=seed,
                facts={"task": "text", "step": step, "seconds": seconds})
        for step, seconds, loss in points
    ]  # fmt: skip


SLOW = curve("kernelized", (0, 0, 2.0), (10, 9, 1.5), (20, 18, 1.0))


def words(*curves):
    return [verdict.word for verdict in STUDY.verdicts([row for rows in curves for row in rows])]


def test_each_claim_can_agree_fail_and_be_undecided():
    softmax = curve("softmax", (0, 0, 2.0), (10, 6, 1.5), (20, 12, 1.0))
    fast = curve("skyformer", (0, 0, 2.0), (10, 4, 1.6), (20, 8, 1.2))
    assert words(softmax, SLOW, fast) == ["agrees", "agrees"]
    late = curve("skyformer", (0, 0, 2.0), (10, 4, 1.2), (20, 14, 0.9))
    assert words(softmax, SLOW, late) == ["does not agree", "agrees"]
    # When it ends, softmax has come to 1.5.
    worse = curve("skyformer", (0, 0, 2.0), (10, 4, 1.6), (20, 8, 1.6))
    assert words(softmax, SLOW, worse) == ["agrees", "does not agree"]
    assert words(softmax, fast) == words(softmax, SLOW, fast[:2]) == ["cannot tell", "cannot tell"]
    # By a hair, and beside a loss that has not fallen.
    near = curve("skyformer", (0, 0, 2.0), (10, 4, 1.6), (20, 11.5, 1.47))
    assert words(softmax, SLOW, near) == ["cannot tell", "cannot tell"]
    idle = curve("softmax", (0, 0, 2.0), (10, 6, 1.95), (20, 12, 1.9))
    for ours in (fast, late, worse):
        assert words(idle, SLOW, ours) == ["cannot tell", "cannot tell"]
    # A loss that is not finite is no lower one.
    lost = curve("skyformer", (0, 0, 2.0), (10, 4, 1.6))
    assert words(softmax, SLOW, lost) == ["cannot tell", "cannot tell"]


def test_seeds_are_averaged():
    table = STUDY.tables(
        curve("softmax", (0, 0, 2.0), (10, 6, 1.0)) + curve("softmax", (0, 0, 2.2), (10, 8, 2.0), seed=1)
    )
    assert table[0].lines == [["softmax", "10", "7.0", "1.500", "1.500"]]


def test_runs_that_are_there_are_read(data, tmp_path):
    runs = tmp_path / "runs"
    for method in ("softmax", "skyformer"):
        train(
            "listops", attention=method, data=data, preset="demo", steps=4, batch_size=4, evaluate_every=2, log_every=2,
            device="cpu", to=runs / f"listops-{method}-demo-seed0",
        )  # fmt: skip
    job = check_study("skyformer-appendix-a", Setting(runs=runs), tmp_path)
    summary = run_study(job, lambda line: None)
    assert [line[:2] for line in summary.tables[0].lines] == [["skyformer", "4"], ["softmax", "4"]]
    assert all(math.isfinite(float(line[3])) for line in summary.tables[0].lines)
    assert [verdict.agrees for verdict in summary.verdicts] == [None, None]


@pytest.mark.parametrize("size", ["small", "paper"])
def test_a_folder_without_runs_ends_before_any_work(size, tmp_path):
    if size == "paper":
        with pytest.raises(ValueError, match="needs trained runs"):
            STUDY.plan(Setting(size="paper"))
    with pytest.raises(ValueError, match="holds no run with a validation loss") as error:
        STUDY.plan(Setting(size=size, runs=tmp_path))
    assert "\n" not in str(error.value)
