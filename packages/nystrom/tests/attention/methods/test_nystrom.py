import pytest
import torch

from nystrom import nystrom_attention, softmax_attention
from nystrom.attention.methods.nystrom import nystrom_factors, nystrom_rows
from nystrom.landmarks import segment_means
from nystrom.linalg import pinv_iterative, residual


def draw(seed, n, s=None, *, b=2, h=3, d=8, size=1.0):
    g = torch.Generator().manual_seed(seed)
    s = n if s is None else s
    return [size * torch.randn(b, h, t, d, generator=g, dtype=torch.float64) for t in (n, s, s)]


def three_matrices(q, k, v, m, *, pinv=pinv_iterative):
    """Eq. (13) written out, with its n x m and m x s matrices."""
    scale = q.shape[-1] ** -0.5
    q_tilde, k_tilde = segment_means(q, m), segment_means(k, m)
    f, a, b = (torch.softmax(scale * x @ y.mT, dim=-1) for x, y in ((q, k_tilde), (q_tilde, k_tilde), (q_tilde, k)))
    return f @ pinv(a) @ (b @ v)


@pytest.mark.parametrize(("n", "s"), [(24, 24), (25, 25), (30, 17)])
def test_two_fused_calls_are_the_three_matrices(n, s):
    q, k, v = draw(0, n, s)
    out = nystrom_attention(q, k, v, num_landmarks=6)
    torch.testing.assert_close(out, three_matrices(q, k, v, 6), rtol=1e-10, atol=1e-12)


def test_the_authors_start_value_is_theirs():
    q, k, v = draw(1, 24)

    def authors(a):
        eye = torch.eye(a.shape[-1], dtype=a.dtype)
        z = a.mT / a.sum(dim=-2).max()
        for _ in range(6):
            az = a @ z
            z = 0.25 * z @ (13 * eye - az @ (15 * eye - az @ (7 * eye - az)))
        return z

    out = nystrom_attention(q, k, v, num_landmarks=6, z0="authors")
    torch.testing.assert_close(out, three_matrices(q, k, v, 6, pinv=authors), rtol=1e-10, atol=1e-12)


def test_more_landmarks_come_nearer_to_softmax_on_smooth_inputs():
    # Neighbouring tokens are alike, as in text: segment means are made for this.
    q, k, v = (torch.cumsum(x, dim=2) / 4 for x in draw(2, 256))
    exact = softmax_attention(q, k, v)
    errors = [
        (nystrom_attention(q, k, v, num_landmarks=m, pinv="ridge") - exact).norm() / exact.norm() for m in (4, 16, 64)
    ]
    assert errors[0] > 2 * errors[1] > 2.5 * errors[2]


@pytest.mark.parametrize("masked", [False, True])
def test_rows_times_values_are_the_outputs(masked):
    q, k, v = draw(3, 20)
    keep = None
    if masked:
        keep = torch.ones(2, 20, dtype=torch.bool)
        keep[0, 15:] = False
        keep[1, 4:] = False  # fewer real tokens than landmarks: exact rows
    queries = torch.tensor([0, 7, 3, 19])
    rows = nystrom_rows(q, k, queries, keep=keep, num_landmarks=5)
    expected = nystrom_attention(q, k, v, num_landmarks=5, keep=keep)[:, :, queries]
    torch.testing.assert_close(rows @ v, expected, rtol=1e-9, atol=1e-11)
    if masked:
        assert not rows[0, :, :, 15:].any()
        torch.testing.assert_close(rows[1, :, :2].sum(-1)[:, 0], torch.ones(3, dtype=torch.float64))


def test_rows_are_exact_where_landmarks_suffice():
    q, k, _ = draw(4, 9)
    rows = nystrom_rows(q, k, torch.arange(9), num_landmarks=9)
    torch.testing.assert_close(rows, torch.softmax(q @ k.mT / 8**0.5, -1), rtol=1e-12, atol=1e-14)


@pytest.mark.refuses
@pytest.mark.parametrize(
    ("queries", "message"),
    [(torch.tensor([20]), r"outside 0 \.\.\. 19"), (torch.tensor([-1]), "outside"), (torch.tensor([0.5]), "integer")],
)
def test_rows_of_no_query_raise(queries, message):
    q, k, _ = draw(3, 20)
    with pytest.raises(ValueError, match=message):
        nystrom_rows(q, k, queries)


def test_the_residual_can_be_had():
    q, k, _ = draw(5, 64)
    few, many = (
        residual(f.a, f.inverse) for f in (nystrom_factors(q, k, num_landmarks=8, pinv_steps=p) for p in (2, 40))
    )
    assert few.shape == (2, 3)
    assert (few > 0.1).all()
    # A random 8 x 8 attention matrix has a condition below 1e6.
    assert (many < 1e-6).all()


def test_a_landmark_for_each_token_leaves_no_residual_with_and_without_a_mask():
    q, k, _ = draw(5, 10)
    for keep in (None, torch.ones(2, 10, dtype=torch.bool)):
        factors = nystrom_factors(q, k, num_landmarks=16, keep=keep)
        assert residual(factors.a, factors.inverse).abs().max() < 1e-12, "the identity and its inverse, as documented"


def test_gradients_reach_queries_through_landmarks():
    q, k, v = (x[:1, :1].requires_grad_() for x in draw(6, 11, d=3))
    assert torch.autograd.gradcheck(lambda *x: nystrom_attention(*x, num_landmarks=4, pinv="ridge"), (q, k, v))
    assert torch.autograd.gradcheck(lambda *x: nystrom_attention(*x, num_landmarks=4, z0="authors"), (q, k, v))


def test_scale_multiplies_the_scores():
    q, k, v = draw(7, 20)
    out = nystrom_attention(q, k, v, num_landmarks=5, scale=0.1)
    expected = nystrom_attention(q * 0.1 * 8**0.5, k, v, num_landmarks=5)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)


def test_an_autocast_result_past_float16_stays_finite():
    q, k, v = (x.half() for x in draw(8, 64, size=3.0))
    out = nystrom_attention(q, k, v.sign() * 60000, num_landmarks=16)
    assert out.isfinite().all()


@pytest.mark.refuses
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_landmarks": 0}, "num_landmarks is 0"),
        ({"num_landmarks": 2.5}, "num_landmarks is 2.5"),
        ({"landmarks": "random"}, "landmarks is 'random'"),
        ({"pinv": "newton"}, "pinv is 'newton'"),
        ({"pinv_steps": -1}, "pinv_steps is -1"),
        ({"z0": "mine"}, "z0 is 'mine'"),
        ({"backend": "cuda"}, "backend is 'cuda'"),
        ({"backend": "triton", "pinv": "ridge"}, "backend .triton. has no Triton code for pinv=.ridge."),
        (
            {"backend": "triton", "landmarks": "kmeans"},
            "has no Triton code for landmarks=.kmeans.: pass landmarks=.segment_means.",
        ),
    ],
)
def test_bad_options_raise(options, message):
    with pytest.raises(ValueError, match=message):
        nystrom_attention(*draw(0, 8), **options)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("num_landmarks", [4, 5])
def test_gradients_made_in_place_are_those_of_the_plain_operations(num_landmarks, masked):
    q, k, v = (x.requires_grad_() for x in draw(0, 20))
    weight = torch.randn(3, 1, 5, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    keep = None
    if masked:
        keep = torch.arange(20)[None] < torch.tensor([[17], [3]])
        keep[0, 4] = False
    for skip in (None, weight):
        out = nystrom_attention(q, k, v, num_landmarks=num_landmarks, keep=keep, skip=skip)
        leaves = [q, k, v] if skip is None else [q, k, v, skip]
        ours = torch.autograd.grad(out.sin().sum(), leaves, retain_graph=True)
        again = torch.autograd.grad(out.sin().sum(), leaves, create_graph=True)
        torch.testing.assert_close(ours, again, rtol=1e-10, atol=1e-11)
        # In the low dtypes nothing is shared: another path to the same gradients, up to their rounding.
        low = [x.detach().bfloat16().requires_grad_() for x in leaves]
        other = nystrom_attention(
            *low[:3], num_landmarks=num_landmarks, keep=keep, skip=None if skip is None else low[3]
        )
        for x, y in zip(ours, torch.autograd.grad(other.double().sin().sum(), low), strict=True):
            assert (x - y).norm() <= 0.1 * x.norm()


@pytest.mark.parametrize(
    ("d", "m", "n", "size"), [(1, 33, 40, 1.0), (2, 16, 40, 1.0), (4, 32, 256, 1.0), (8, 64, 256, 0.5)]
)
def test_the_gradient_of_the_exact_inverse_is_right_where_singular_values_are_small(d, m, n, size):
    for seed in range(5):
        inputs, way = draw(seed, n, b=1, h=2, d=d, size=size), draw(seed + 5, n, b=1, h=2, d=d)
        leaves = [x.requires_grad_() for x in inputs]

        def attend(step, inputs=inputs, way=way):
            return nystrom_attention(
                *(x + step * y for x, y in zip(inputs, way, strict=True)), num_landmarks=m, pinv="exact"
            ).sum()

        found = torch.autograd.grad(attend(0.0), leaves)
        expected = (attend(1e-5) - attend(-1e-5)) / 2e-5
        # Rounding is amplified by up to 1 / sqrt(eps) in the output, over the step.
        torch.testing.assert_close(
            sum((x * y).sum() for x, y in zip(found, way, strict=True)), expected, rtol=2e-3, atol=1e-3
        )
