import math
from dataclasses import replace

import numpy as np
import pytest

from nystrom_lab.measure.rows import new_row
from nystrom_lab.studies.reproduce.study import Setting
from nystrom_lab.studies.stability import learning_rates
from nystrom_lab.studies.stability.learning_rates import METHODS, STUDIES
from nystrom_lab.studies.stability.loop import Trace

STUDY = STUDIES["learning-rates"]


def runs(diverged=None, learned=(), methods=METHODS, seeds=4):
    """Rows of runs of each method at each of two learning rates; the share that diverged, and what learned."""
    diverged = {} if diverged is None else diverged
    return [
        new_row(study="", quantity=quantity, method=method, value=value, unit="", device="cpu", seed=seed,
                facts={"learning_rate": rate, "b": 1, "steps": 2})
        for method in methods
        for rate in (0.1, 0.01)
        for seed in range(seeds)
        for quantity, value in (
            ("largest gradient norm", 2.0), ("diverged", float(seed < seeds * diverged.get((method, rate), 0.0))),
            ("last loss over first", 0.7 if (method, rate) in learned else 0.99), ("best accuracy", 0.2)
        )
    ]  # fmt: skip


ALL = {(method, 0.1) for method in METHODS}
SOFTMAX = {("softmax", 0.1): 1.0, ("softmax", 0.01): 1.0}
KERNELIZED = {("kernelized", 0.1): 1.0, ("kernelized", 0.01): 1.0}


@pytest.mark.parametrize(
    ("made", "fails"),
    [
        (runs({("nystrom", 0.1): 0.5}), True),
        (runs(learned=ALL), False),
        (runs({("nystrom", 0.1): 0.25}, ALL), False),
        # No claim rests on near_far.
        (runs({("near_far", 0.1): 1.0}, ALL), False),
        # Nothing learned, one method did not, or one seed.
        (runs(), None),
        (runs(learned=ALL - {("skyformer", 0.1)}), None),
        (runs({("nystrom", 0.1): 1.0}, ALL, seeds=1), None),
        ([], None),
    ],
)
def test_runs_that_diverge_at_one_rate_fail_and_runs_that_learned_did_not(made, fails):
    assert STUDY.verdicts(made)[0].agrees is fails


@pytest.mark.parametrize(
    ("made", "alleviates"),
    [
        (runs(SOFTMAX), True),
        (runs(KERNELIZED), False),
        # One more run that diverged is within the noise, and where none did there is nothing to alleviate.
        (runs({("softmax", 0.1): 0.25}), None),
        (runs(learned=ALL), None),
        (runs(SOFTMAX | KERNELIZED), None),
        (runs(SOFTMAX, methods=("softmax", "kernelized")), None),
    ],
)
def test_a_kernel_alleviates_what_softmax_suffers(made, alleviates):
    verdict = STUDY.verdicts(made)[1]
    assert verdict.agrees is alleviates
    assert "softmax" in verdict.numbers


@pytest.mark.parametrize(
    ("last", "norm", "diverged"), [(2.31, 4.0, 0.0), (2.6, 4.0, 1.0), (1.0, 1001.0, 1.0), (math.nan, 4.0, 1.0)]
)
def test_a_run_that_stays_where_it_began_has_not_diverged(last, norm, diverged, monkeypatch, tmp_path):
    none = np.zeros(0)
    trace = Trace(np.array([2.3] + [last] * 20), np.array([3.0] * 20 + [norm]), none, none, none, none)
    monkeypatch.setattr(learning_rates, "train_plainly", lambda *_, **__: trace)
    monkeypatch.setattr(learning_rates, "_SHORT", replace(learning_rates._SHORT, train=32, val=64))
    rows = STUDY.plan(Setting()).parts[0].measure(tmp_path)
    assert [row.value for row in rows if row.quantity == "diverged"] == [diverged]


@pytest.mark.slow
def test_a_run_is_a_part_and_leaves_its_trace(tmp_path):
    plan = STUDY.plan(Setting())
    assert len(plan.parts) == 6 * 3 * 2
    assert [part.name for part in plan.parts[:6]] == [f"{method}-0.001-seed=0" for method in METHODS]
    rows = list(plan.parts[4].measure(tmp_path))
    assert {row.quantity: row.method for row in rows} == dict.fromkeys(
        ("largest gradient norm", "last loss over first", "diverged", "best accuracy"), "skyformer_softmax"
    )
    trace = np.load(tmp_path / "trace-skyformer_softmax-0.001-0.npz")
    by_quantity = {row.quantity: row.value for row in rows}
    assert by_quantity["largest gradient norm"] == trace["norm"].max()
    ratio = trace["loss"][-10:].mean() / trace["loss"][0]
    assert by_quantity["diverged"] == float(ratio > 1.1 or trace["norm"].max() > 1e3)
    assert len(STUDY.figures(rows, tmp_path)[""].axes) == 2
    assert [line[0] for line in STUDY.tables(rows)[0].lines] == ["skyformer_softmax"]


def test_the_papers_size_is_the_published_training(tmp_path):
    plan = STUDY.plan(Setting(size="paper"))
    assert plan.setting["training"] == "50000 steps of 32, 128 landmarks"
    assert plan.setting["task"] == "listops (drawn, to 2000 tokens)"
    with pytest.raises(ValueError, match="holds no prepared listops"):
        STUDY.plan(Setting(size="paper", data=tmp_path))
