from dataclasses import replace

import numpy as np
import pytest
import torch

from nystrom_lab.measure.rows import Row
from nystrom_papers.studies.approximation.inversion import (
    CONDITION,
    ERROR,
    GRADIENT,
    METHODS,
    RATIO,
    STUDIES,
    TIME,
    conjugate_gradient,
    error_rows,
    made_matrix,
)

STUDY = STUDIES["inversion"]


def test_made_matrices_have_their_condition():
    values = np.linalg.svd(made_matrix(16, 3).numpy(), compute_uv=False)
    np.testing.assert_allclose(values[:, 0] / values[:, -1], 1e3, rtol=1e-9)


@pytest.mark.parametrize("method", [name for name in METHODS if name != "iterations"])
def test_a_method_inverts_a_well_conditioned_matrix(method):
    a = made_matrix(8, 1)
    np.testing.assert_allclose(METHODS[method](a), np.linalg.inv(a.numpy()), atol=1e-9)


def test_conjugate_gradients_of_as_many_steps_as_eigenvalues_are_exact():
    basis = torch.linalg.qr(torch.randn(1, 6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)).Q
    a = (basis * torch.tensor([1.0, 1.0, 1.0, 0.2, 0.2, 0.2], dtype=torch.float64)) @ basis.mT
    np.testing.assert_allclose(conjugate_gradient(a, steps=2), np.linalg.inv(a.numpy()), atol=1e-12)
    assert (conjugate_gradient(a, steps=1) - conjugate_gradient(a, steps=2)).abs().max() > 0.1
    # Further steps of what has ended change nothing.
    np.testing.assert_allclose(conjugate_gradient(a, steps=30), np.linalg.inv(a.numpy()), atol=1e-12)


def test_errors_are_those_of_float32_and_grow_with_the_condition():
    found = {
        power: {(row.method, row.quantity): row.value for row in error_rows(made_matrix(16, power), ("solve",), {})}
        for power in (1, 4)
    }
    assert found[4]["", CONDITION] == pytest.approx(1e4, rel=0.01)
    for quantity in (ERROR, GRADIENT):
        assert 1e-8 < found[1]["solve", quantity] < 1e-5
        assert found[4]["solve", quantity] > 30 * found[1]["solve", quantity]


def test_a_batch_that_a_solver_refuses_is_lost(monkeypatch):
    def refused(a):
        raise torch.linalg.LinAlgError("singular")

    monkeypatch.setitem(METHODS, "svd", refused)
    found = {row.quantity: row.value for row in error_rows(made_matrix(4, 1), ("svd",), {}) if row.method}
    assert found == {ERROR: 1e30, GRADIENT: 1e30}


def row_of(quantity, method, value, m, where, matrix="N"):
    return Row(
        study="", quantity=quantity, method=method, value=value, unit="", m=m, low=0.9 * value, high=1.1 * value,
        facts={"where": where} | ({} if quantity in (TIME, RATIO) else {"matrix": matrix}), device="d",
    )  # fmt: skip


def agreeing():
    rows = []
    for m in (16, 64, 256):
        for where, slow in (("CPU", 1.0), ("GPU", 3.0)):
            rows += [row_of(TIME, "solve", slow, m, where), row_of(RATIO, "svd", 2.0, m, where)]
            rows += [row_of(ERROR, "solve", 1e-6 * slow, m, where), row_of(GRADIENT, "iterations", 1e-6, m, where)]
            rows += [row_of(GRADIENT, method, 5e-6, m, where) for method in ("solve", "conjugate gradient")]
    return rows


def decided(quantity, method, where, *values):
    """Verdicts where the rows of a method, in the order of m, have other values."""
    others = iter(values)
    rows = [
        replace(row, value=(v := next(others)), low=0.9 * v, high=1.1 * v)
        if (row.quantity, row.method, row.fact("where")) == (quantity, method, where) else row
        for row in agreeing()
    ]  # fmt: skip
    return [verdict.agrees for verdict in STUDY.verdicts(rows)]


@pytest.mark.parametrize(
    ("place", "changed", "agrees"),
    [
        (0, (TIME, "solve", "GPU", 0.5, 0.5, 0.9), False),
        (0, (TIME, "solve", "GPU", 0.5, 3.0, 3.0), None),
        (1, (ERROR, "solve", "GPU", 1e-6, 0.5e-6, 1e-6), False),
        (1, (ERROR, "solve", "GPU", 1e-6, 1.5e-6, 1e-6), None),
        (2, (RATIO, "svd", "GPU", 2.0, 2.0, 0.8), False),
        (2, (RATIO, "svd", "GPU", 2.0, 2.0, 1.05), None),
        (4, (RATIO, "svd", "CPU", 2.0, 2.0, 0.8), False),
        (4, (RATIO, "svd", "CPU", 2.0, 2.0, 1.05), None),
        (3, (GRADIENT, "conjugate gradient", "CPU", 1e-6, 1e-6, 2e-6), False),
        (3, (GRADIENT, "conjugate gradient", "CPU", 1e-6, 1e-6, 5e-6), None),
        (5, (GRADIENT, "solve", "CPU", 1e-6, 1e-6, 2e-6), False),
    ],
)
def test_each_rule_decides_in_every_way(place, changed, agrees):
    assert [verdict.agrees for verdict in STUDY.verdicts(agreeing())] == [True] * 6
    assert decided(*changed) == [agrees if other == place else True for other in range(6)]


def test_without_a_gpu_what_is_said_of_one_cannot_be_told():
    rows = [row for row in agreeing() if row.fact("where") == "CPU"]
    assert [verdict.agrees for verdict in STUDY.verdicts(rows)] == [None, None, None, True, True, True]
