"""The calibration of errors from sampled queries, on a small model and on hand-made rows."""

from dataclasses import replace

import pytest
import torch

from nystrom.attention.functions import FUNCTIONS
from nystrom.inspection.sampling import Sample, draw_queries, estimate_ratio
from nystrom_lab.measure.rows import new_row
from nystrom_lab.studies.fidelity.calibration import STUDIES
from nystrom_lab.studies.reproduce.encoders import find_encoder
from nystrom_lab.studies.reproduce.run import check_study, run_study

NAME = "inspect-calibration"
NEAR, HELD = "within 20 %", "held by the interval"
ROW = new_row(study=NAME, quantity=NEAR, method="a", value=0, unit="", device="cpu", n=512, m=128, command="c",
              repeats=10_000)  # fmt: skip


def test_the_shares_are_those_of_the_draws_and_all_queries_are_exact(tiny_setting, tmp_path):
    job = check_study(NAME, tiny_setting, tmp_path)
    (rows,) = (list(part.measure(tmp_path)) for part in job.plan.parts if part.name == "performer-256")
    shares = {(row.quantity, row.m): row.value for row in rows}
    # The small model has 32 positions: from 32 queries on all are taken, and the interval has no width.
    assert shares[NEAR, 32] == shares[NEAR, 256] == 1
    assert 0.5 < shares[HELD, 16] < 1
    encoder = find_encoder(tiny_setting)
    given, generator, hits = encoder.record(32, 4, (0, 1, 2)), torch.Generator().manual_seed(0), []
    for q, k, v in given.values():
        exact = FUNCTIONS["softmax"](q, k, v)
        with torch.no_grad():
            off = (FUNCTIONS["performer"](q, k, v, num_features=256) - exact).double().square().sum(dim=-1)
        size = exact.double().square().sum(dim=-1)
        wanted = (off.sum(dim=(0, 2)) / size.sum(dim=(0, 2))).sqrt()
        for count in (16, 32, 64, 128, 256):
            for _ in range(40):
                drawn = [draw_queries(torch.arange(32), count, generator) for _ in range(4)]
                samples = [Sample(32, off[b][:, at], size[b][:, at]) for b, at in enumerate(drawn)]
                if count == 16:
                    found = estimate_ratio(samples, root=True)
                    hits.append((found.low <= wanted) & (wanted <= found.high))
    assert shares[HELD, 16] == pytest.approx(float(torch.stack(hits).double().mean()))


def test_an_interrupted_study_goes_on(tiny_setting, tmp_path):
    job = check_study(NAME, tiny_setting, tmp_path)
    parts = job.plan.parts[:2]
    run_study(job._replace(plan=job.plan._replace(parts=parts[:1])), lambda line: None)
    said = []
    run_study(job._replace(plan=job.plan._replace(parts=parts)), said.append)
    assert said[0].endswith("continuing, 1 of 2 parts have their rows.")
    assert (tmp_path / f"{NAME}-small" / f"{NAME}.png").is_file()


@pytest.mark.parametrize(
    ("near", "held", "agrees"),
    # Two standard errors of a share of .95 of 10,000 are .004.
    [
        (0.955, 0.926, (True, True)),
        (0.94, 0.99, (False, False)),
        (1.0, 0.91, (True, False)),
        (0.952, 0.923, (None, None)),
        (0.948, 0.978, (None, None)),
    ],
)  # fmt: skip
def test_the_rules_decide_by_the_method_that_is_worst(near, held, agrees):
    rows = [replace(ROW, method=name, value=share) for name, share in (("a", 0.99), ("b", near))]
    rows += [replace(ROW, quantity=HELD, method=name, value=share) for name, share in (("a", 0.95), ("b", held))]
    rows += [replace(row, m=16, value=0.1) for row in rows]
    assert tuple(verdict.agrees for verdict in STUDIES[NAME].verdicts(rows)) == agrees


def test_without_the_deciding_rows_no_rule_decides():
    rows = [replace(ROW, value=1.0), replace(ROW, method="b", m=64, value=1.0)]
    assert [verdict.agrees for verdict in STUDIES[NAME].verdicts(rows)] == [None, None]


def test_too_little_text_raises_before_any_work(tiny_setting, tmp_path):
    short = tmp_path / "short.txt"
    short.write_text("the river and the stone " * 10)
    with pytest.raises(ValueError, match="expected at least 128"):
        check_study(NAME, replace(tiny_setting, texts=(short,)), tmp_path / "out")
