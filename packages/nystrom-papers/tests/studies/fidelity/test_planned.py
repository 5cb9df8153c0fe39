"""The study of plans: its texts, its retrieval and its rules, and one length of it on a small model."""

from dataclasses import replace

import pytest
import torch

from nystrom_lab.measure.rows import Row, read_rows
from nystrom_papers.studies.fidelity.planned import STUDIES, halves, nearest_others
from nystrom_papers.studies.reproduce.run import check_study, run_study

NAME = "inspect-plans"
ERROR, FOUND, CHANGED = "relative error of the hidden states", "halves found", "answers that change"
TIME, RATIO, MEMORY = "forward time", "forward time / exact", "forward memory"


@pytest.fixture
def long_setting(tiny_setting, prose, tmp_path):
    text = tmp_path / "long.txt"
    text.write_text(prose.read_text() * 5)
    return replace(tiny_setting, texts=(text,))


def test_halves_share_a_passage_and_no_token():
    # 510 tokens are 17 stretches of 30.
    texts = halves(torch.arange(5000), 510, 3)
    assert texts.shape == (6, 510)
    assert texts[0, :31].tolist() == [*range(30), 60]
    assert texts[1, :31].tolist() == [*range(30, 60), 90]
    assert sorted(texts[2:4].flatten().tolist()) == list(range(1020, 2040))


def test_the_nearest_other_text_is_never_itself():
    means = torch.tensor([[1.0, 0.0], [2.0, 0.2], [0.0, 3.0], [0.1, 1.0]])
    assert nearest_others(means).tolist() == [1, 0, 3, 2]


@pytest.mark.slow
def test_a_length_beyond_the_positions(long_setting, tmp_path):
    job = check_study(NAME, long_setting, tmp_path)
    job = job._replace(plan=job.plan._replace(parts=[part for part in job.plan.parts if part.name.endswith("n=128")]))
    run_study(job, lambda line: None)
    folder = tmp_path / f"{NAME}-small"
    assert (folder / "plan-128-0.1.json").is_file()
    assert (folder / f"{NAME}.png").is_file()
    rows = {(row.quantity, row.method): row for row in read_rows(folder / "rows.csv")}
    assert rows[ERROR, "softmax"].value == rows[CHANGED, "softmax"].value == 0
    assert rows[RATIO, "softmax"].value == 1
    assert rows[FOUND, "softmax"].repeats == 16
    assert rows[ERROR, "plan 0.1"].value < rows[ERROR, "nystrom-64"].value
    assert rows[MEMORY, "near_far"].value > 0
    assert "positions=32,interpolated" in rows[TIME, "near_far"].words
    tables = STUDIES[NAME].tables(list(rows.values()))
    assert [line[1] for line in tables[0].lines] == ["softmax", "nystrom-64", "near_far", "plan 0.1"]
    assert "layer" in tables[1].lines[0][2]


def row(quantity, method, value, n=512, part=0.0):
    """A row whose quartiles are a part of its value away."""
    return Row(study="", quantity=quantity, method=method, value=value, unit="", n=n, repeats=200, device="a CPU",
                   low=value * (1 - part), high=value * (1 + part))  # fmt: skip


@pytest.mark.parametrize(
    ("error", "ratio", "found", "changed", "agrees"),
    [
        (0.05, 1.02, 0.80, 0.0, [True] * 3), (0.056, 1.05, 0.70, 0.1, [False] * 3),
        # Above the budget by less than a tenth, a limit within the quartiles, and halves lost within the noise.
        (0.054, 1.03, 0.785, 0.1, [None] * 3),
    ],
)  # fmt: skip
def test_each_claim_is_decided_by_its_rule(error, ratio, found, changed, agrees):
    rows = [row(ERROR, "plan 0.05", error), row(RATIO, "plan 0.05", ratio, part=0.005)]
    rows += [row(FOUND, "softmax", 0.80), row(FOUND, "plan 0.05", found), row(CHANGED, "plan 0.05", changed)]
    assert [verdict.agrees for verdict in STUDIES[NAME].verdicts(rows)] == agrees
