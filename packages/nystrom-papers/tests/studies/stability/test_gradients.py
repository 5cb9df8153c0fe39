from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nystrom.attention.methods.softmax import softmax_attention
from nystrom_lab.measure.rows import Row
from nystrom_papers.studies.approximation.spectral_norm import printed_form
from nystrom_papers.studies.reproduce.encoders import Recording
from nystrom_papers.studies.stability import gradients
from nystrom_papers.studies.stability.gradients import ALL, OURS, PRINTED, RATIO, STUDIES, TENFOLD, gradient_norms

STUDY = STUDIES["skyformer-gradients"]


def shares(of_printed, of_ours=0.0, heads=200):
    """Rows of both forms at three sizes."""
    return [
        Row(study="", quantity=quantity, method=method, value=value, unit="", m=m, n=512, repeats=heads,
                device="a CPU", facts={"layer": ALL})
        for m in (16, 32, 64)
        for method, share in ((PRINTED, of_printed), (OURS, of_ours))
        for quantity, value in ((RATIO, 1.5), (TENFOLD, share))
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "word"),
    [
        (shares(0.10), "agrees"),
        (shares(0.0, 0.5), "does not agree"),
        # Three of a hundred lie within the errors, for few heads even where ten of a hundred were found.
        (shares(0.04), "cannot tell"),
        (shares(0.10, heads=20), "cannot tell"),
        ([], "cannot tell"),
    ],
)
def test_the_printed_form_explodes_where_many_heads_are_far_above_softmax(rows, word):
    [verdict] = STUDY.verdicts(rows)
    assert verdict.word == word
    assert not rows or f"{OURS} {100 * rows[3].value:.1f} % and 1.50 (m=16)" in verdict.numbers


def test_one_size_at_which_it_does_not_explode_refuses():
    rows = [replace(row, value=0.0) if row.m == 64 else row for row in shares(0.5)]
    assert STUDY.verdicts(rows)[0].word == "does not agree"


def test_a_norm_is_that_of_queries_and_keys_of_each_head():
    g = torch.Generator().manual_seed(0)
    given = Recording(*(torch.randn(2, 3, 5, 4, dtype=torch.float64, generator=g) for _ in range(3)))
    out = torch.randn(2, 3, 5, 4, dtype=torch.float64, generator=g)
    norms, step = gradient_norms(softmax_attention, given, out), 1e-6
    direction = [torch.randn(2, 3, 5, 4, dtype=torch.float64, generator=g) for _ in range(2)]
    ends = [
        (softmax_attention(given.q + t * direction[0], given.k + t * direction[1], given.v) * out).sum((2, 3))
        for t in (step, -step)
    ]
    slope = (ends[0] - ends[1]) / (2 * step)
    # No direction is steeper than the gradient.
    assert norms.shape == (2, 3)
    assert (slope.abs() <= norms * torch.cat(direction, dim=2).flatten(2).norm(dim=2)).all()
    scaled = gradient_norms(softmax_attention, given, 3 * out)
    torch.testing.assert_close(scaled, 3 * norms)


def test_the_printed_form_has_a_gradient_where_a_landmark_is_drawn_twice():
    q, k, v = (torch.randn(6, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    drawn = torch.tensor([0, 0, 3, 7, 7, 9])
    printed_form(q, k, v, drawn, inverse=torch.linalg.pinv).sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in (q, k, v))
    torch.testing.assert_close(printed_form(q, k, v, drawn, inverse=torch.linalg.pinv), printed_form(q, k, v, drawn))


def test_rows_tables_and_a_figure_of_an_encoder(tiny_setting, monkeypatch):
    monkeypatch.setattr(gradients, "_TOKENS", 24)
    monkeypatch.setattr(gradients, "_LANDMARKS", (4, 8))
    [part] = STUDY.plan(tiny_setting).parts
    rows = list(part.measure(Path()))
    layers = len({row.facts["layer"] for row in rows}) - 1
    assert len(rows) == 2 * 2 * 2 * (layers + 1)
    assert all(row.value > 0 for row in rows if row.quantity == RATIO)
    [table] = STUDY.tables(rows)
    assert len(table.lines) == 2 * (layers + 1)
    assert STUDY.verdicts(rows)[0].numbers.count("m=8") == 2
    assert sum(axes.get_visible() for axes in STUDY.figures(rows, Path())[""].axes) == layers
