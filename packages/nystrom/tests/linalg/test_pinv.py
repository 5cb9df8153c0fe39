import math

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nystrom.linalg import pinv, pinv_exact, pinv_iterative, pinv_ridge, residual
from nystrom.linalg.pinv import iterate, start_value


def attention_matrix(m, seed, *, size=2.0, b=1):
    g = torch.Generator().manual_seed(seed)
    return torch.softmax(size * torch.randn(b, m, m, generator=g, dtype=torch.float64), dim=-1)


@settings(deadline=None, max_examples=20)
@given(m=st.integers(1, 16), seed=st.integers(0, 1000), steps=st.integers(0, 6))
def test_the_residual_follows_the_cubic_law(m, seed, steps):
    a = attention_matrix(m, seed)
    eye = torch.eye(m, dtype=torch.float64)
    r0, r1 = (eye - a @ pinv_iterative(a, steps=k) for k in (steps, steps + 1))
    # float64 rounding over a handful of products whose factors stay below 3.25^7
    torch.testing.assert_close(r1, r0 @ r0 @ r0 @ (0.75 * eye + 0.25 * r0), rtol=0, atol=1e-10)


def test_the_start_value_is_that_of_the_paper():
    a = attention_matrix(7, 0, b=3)
    z = pinv_iterative(a, steps=0)
    for i in range(3):
        norms = np.linalg.norm(a[i].numpy(), 1) * np.linalg.norm(a[i].numpy(), np.inf)
        np.testing.assert_allclose(z[i].numpy(), a[i].numpy().T / norms, rtol=1e-14)


@pytest.mark.parametrize("z0", ["paper", "authors", "sequence"])
def test_the_iteration_goes_on_from_where_it_was(z0):
    a = attention_matrix(7, 0, b=3)[:, None]
    z = iterate(a, iterate(a, start_value(a, z0=z0), 2), 3)
    # The rounding of the start's norms
    torch.testing.assert_close(z, pinv_iterative(a, steps=5, z0=z0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_it_converges_to_the_inverse(seed):
    a = attention_matrix(8, seed) + torch.eye(8, dtype=torch.float64)
    expected = scipy.linalg.inv(a[0].numpy())
    # Condition below 100: rounding of the products.
    np.testing.assert_allclose(pinv_iterative(a, steps=20)[0].numpy(), expected, rtol=0, atol=1e-11)


def test_it_converges_to_the_pseudoinverse_of_a_singular_matrix():
    a = attention_matrix(6, 3) + torch.eye(6, dtype=torch.float64)
    a[0, 4] = a[0, 2]
    expected = scipy.linalg.pinv(a[0].numpy())
    np.testing.assert_allclose(pinv_exact(a)[0].numpy(), expected, rtol=0, atol=1e-12)
    # Rounding leaves a trace in the null space, which every step multiplies by 13/4: 1e-16 * 3.25^12.
    np.testing.assert_allclose(pinv_iterative(a, steps=12)[0].numpy(), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("ridge", [1e-3, 0.1])
def test_the_ridge_damps_each_singular_value(ridge):
    a = attention_matrix(9, 1)
    u, s, vt = scipy.linalg.svd(a[0].numpy())
    damp = ridge**2 * np.linalg.norm(a[0].numpy(), 1) * np.linalg.norm(a[0].numpy(), np.inf)
    expected = (vt.T * (s / (s**2 + damp))) @ u.T
    # A^T A squares the condition: 1e-16 / 1e-6 with the smaller ridge.
    np.testing.assert_allclose(pinv_ridge(a, ridge=ridge)[0].numpy(), expected, rtol=0, atol=1e-7)


def test_only_the_paper_start_leaves_neighbours_alone():
    a = attention_matrix(6, 2, b=2)
    a[1] = a[1] ** 8 / (a[1] ** 8).sum(-1, keepdim=True)
    for z0, same in (("paper", True), ("authors", False)):
        together, alone = pinv(a, z0=z0)[0], pinv(a[:1], z0=z0)[0]
        assert torch.allclose(together, alone, rtol=1e-12) == same


def test_the_start_of_a_sequence_is_that_of_the_authors_for_it_alone():
    a = torch.stack([attention_matrix(6, 2, b=3), attention_matrix(6, 9, b=3) ** 4])
    a = a / a.sum(-1, keepdim=True)
    together = pinv(a, z0="sequence")
    for i in range(2):
        # float64 rounding: the same products, in batches of another size
        torch.testing.assert_close(together[i], pinv(a[i], z0="authors"), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(together, pinv(a, z0="authors"))
    torch.testing.assert_close(pinv(a[0, 0], z0="sequence"), pinv(a[0, 0], z0="paper"), rtol=1e-12, atol=1e-12)


def test_the_residual_of_what_is_not_finite_is_nan_and_its_neighbours_are_left_alone():
    a = torch.eye(3, dtype=torch.float64).repeat(3, 1, 1)
    z = a.clone()
    a[0, 1, 1], z[2, 0, 2] = torch.inf, torch.nan
    found = residual(a, z)
    assert found[1] == 0
    assert found[[0, 2]].isnan().all()


def test_the_residual_is_the_spectral_norm():
    a = attention_matrix(6, 4)
    z = pinv_iterative(a, steps=2)
    expected = np.linalg.norm(np.eye(6) - a[0].numpy() @ z[0].numpy(), 2)
    assert residual(a, z).item() == pytest.approx(expected, rel=1e-12)
    assert residual(a, torch.linalg.inv(a)).item() < 1e-10


def test_singular_values_of_the_size_of_rounding_have_no_inverse():
    # Rows of three different tokens, as of landmarks whose tokens repeat: rank 3, in each of its roundings.
    token = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])
    a = attention_matrix(8, 6)[:, token][:, :, token]
    noise = torch.randn(200, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    inverses = pinv_exact(a + 1e-15 * noise)
    # Rounding times the square of the inverse's norm, about 100
    torch.testing.assert_close(inverses, pinv_exact(a).expand_as(inverses), rtol=0, atol=1e-10)


@pytest.mark.parametrize("inverse", ["iterative", "ridge", "exact"])
def test_gradients_are_right(inverse):
    # Rows of unequal sums: where two tie, the largest has no derivative (in attention all sum to one and never move).
    a = attention_matrix(4, 5) + torch.diag(torch.tensor([0.5, 0.6, 0.7, 0.8], dtype=torch.float64))
    a = a.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: pinv(x, inverse=inverse, steps=3), a)


def test_the_gradient_of_the_exact_inverse_knows_the_singular_values_that_do_not_count():
    g = torch.Generator().manual_seed(8)
    u, vh, weights, way = torch.linalg.qr(torch.randn(4, 6, 6, generator=g, dtype=torch.float64))[0]
    # The last two are below sqrt(eps) of the first, one of them by little.
    s = torch.tensor([1.0, 0.5, 1e-3, 1e-7, 1.2e-8, 1e-12], dtype=torch.float64)
    a = ((u * s) @ vh).requires_grad_()
    (pinv_exact(a) * weights).sum().backward()
    step = 1e-10
    ends = [(pinv_exact(a.detach() + side * step * way) * weights).sum() for side in (1, -1)]
    # The step's error is about its square over that of 1e-7; rounding of the inverse eps / 1e-14, over the step's 1e4.
    torch.testing.assert_close((a.grad * way).sum(), (ends[0] - ends[1]) / (2 * step), rtol=1e-4, atol=0)
    (first,) = torch.autograd.grad(pinv_exact(a).sum(), a, create_graph=True)
    with pytest.raises(RuntimeError, match="exact inverse has no second derivative"):
        first.sum().backward()


@pytest.mark.parametrize("inverse", ["iterative", "ridge", "exact"])
@pytest.mark.parametrize("broken", [torch.nan, torch.inf, 0.0])
def test_a_matrix_without_an_inverse_leaves_its_neighbours_alone(inverse, broken):
    a = attention_matrix(6, 2, b=3)
    soiled = a.clone()
    soiled[1] = broken
    soiled.requires_grad_()
    out = pinv(soiled, inverse=inverse)
    if broken != 0:
        assert not out[1].isfinite().all()
    # float64 rounding: the same decomposition, in batches of another size
    torch.testing.assert_close(out[[0, 2]], pinv(a[[0, 2]], inverse=inverse), rtol=1e-10, atol=1e-10)
    out[[0, 2]].square().sum().backward()
    assert soiled.grad[[0, 2]].isfinite().all()


@pytest.mark.refuses
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": -1}, "pinv_steps is -1"),
        ({"inverse": "svd"}, "pinv is 'svd'"),
        ({"z0": "best"}, "z0 is 'best'"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        pinv(attention_matrix(3, 0), **options)


@pytest.mark.refuses
@pytest.mark.parametrize("ridge", [0.0, math.inf, "1"])
def test_a_ridge_that_is_no_positive_number_is_refused(ridge):
    with pytest.raises(ValueError, match=r"ridge is .*; expected a positive, finite number"):
        pinv_ridge(attention_matrix(3, 0), ridge=ridge)


@pytest.mark.refuses
@pytest.mark.parametrize("inverse", ["iterative", "ridge", "exact"])
@pytest.mark.parametrize("a", [[1.0], torch.ones(3, 4), torch.ones(3), torch.ones(3, 3, dtype=torch.long)])
def test_what_is_no_square_matrix_is_refused(inverse, a):
    with pytest.raises(ValueError, match=r"a is .*; expected (a tensor|square matrices \(\.\., m, m\) of floats)"):
        pinv(a, inverse=inverse)
    with pytest.raises(ValueError, match="z is"):
        residual(torch.eye(3), a)


@pytest.mark.refuses
def test_the_residual_of_matrices_of_two_sizes_is_refused():
    with pytest.raises(ValueError, match=r"z has shape \(4, 4\) but a has \(3, 3\)"):
        residual(torch.eye(3), torch.eye(4))
