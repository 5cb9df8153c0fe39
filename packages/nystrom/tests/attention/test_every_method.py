"""The nine laws that every attention method keeps (see the module docstrings under `nystrom.attention`).

The mark `law` numbers the law that a test holds, and docs/promises.md lists the tests by it (`make tables`).

A method in the registry without a line in `VARIANTS` fails the suite. A line is a small set of options under which a
sequence of a dozen tokens takes the method's own path, not its exact limit.
"""

import contextlib
import dataclasses
import functools
import inspect
import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from nystrom import Alibi, MultiheadAttention, RelativeBuckets, build_attention, reference
from nystrom.attention.functions import FUNCTIONS
from nystrom.attention.methods.informer import _sample as sample_keys
from nystrom.attention.methods.near_far import near_far_rows
from nystrom.attention.methods.nystrom import nystrom_rows
from nystrom.attention.methods.performer import draw_projection
from nystrom.attention.methods.reformer import _rotations as draw_rotations
from nystrom.attention.methods.skyformer import mixed_landmarks
from nystrom.attention.parts.band import pad_to_blocks
from nystrom.attention.parts.causal import QUERY_MEANS, advance, mean_queries, rows_of
from nystrom.attention.parts.clusters import choose
from nystrom.attention.registry import METHODS
from nystrom.attention.skip import depthwise_skip
from nystrom.landmarks import draw as draw_numbers
from nystrom.landmarks import kmeans, segment_means, uniform
from nystrom.linalg import pinv

# Kernels for a GPU: without one they run in Triton's interpreter.
TRITON = {"backend": "triton"}
# An argument of a call, which `build` gives to all calls: no query sees a token after itself.
CAUSAL = {"is_causal": True}


class Buckets(RelativeBuckets):
    """With a name for the test, in place of its numbers."""

    def __repr__(self):
        return "of_T5"


class Slopes(Alibi):
    def __repr__(self):
        return "slopes"


# Others: a function of positions that is added to the scores, here of two heads.
_TABLE = torch.randn(2, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64, device="cpu")
BUCKETS = {"bias": Buckets(_TABLE.to("cuda" if torch.cuda.is_available() else "cpu"), max_distance=7)}
SLOPES = {"bias": Slopes(_TABLE[:, 0].abs().to(BUCKETS["bias"].table.device))}
CALLED = {*CAUSAL, "bias"}
VARIANTS = {
    "softmax": [{}, {"form": "materialised"}, BUCKETS],
    "nystrom": [
        {"num_landmarks": 5},
        {"num_landmarks": 5, "landmarks": "uniform"},
        {"num_landmarks": 5, "landmarks": "kmeans"},
        {"num_landmarks": 5, "pinv": "ridge"},
        {"num_landmarks": 4, "pinv": "exact"},
        {"num_landmarks": 5, "z0": "sequence"},
        {"num_landmarks": 5, **TRITON},
    ],
    "near_far": [
        {"block_size": 4, "reach": 1, "num_heavy": 2, "num_clusters": 3, "exact_up_to": 0},
        {"block_size": 2, "reach": 3, "num_heavy": 0, "num_clusters": 2, "exact_up_to": 0, "iterations": 2},
        {"block_size": 3, "reach": 0, "num_heavy": 4, "num_clusters": 1, "exact_up_to": 0},
        {"block_size": 8, "reach": 1, "num_heavy": 2, "num_clusters": 3, "exact_up_to": 0, **TRITON},
        {"block_size": 4, "reach": 1, "num_heavy": 2, "num_clusters": 3, "exact_up_to": 12},
        {"block_size": 4, "reach": 1, "num_heavy": 2, "num_clusters": 3, "exact_up_to": 0, "num_selected": 2},
        {"block_size": 18, "reach": 0, "num_heavy": 0, "num_clusters": 2, "exact_up_to": 0, "num_selected": 3},
        {"block_size": 4, "num_heavy": 2, "num_clusters": 3, "exact_up_to": 0, **CAUSAL},
        {"block_size": 3, "num_heavy": 0, "num_clusters": 1, "exact_up_to": 9, **CAUSAL},
        {"block_size": 4, "reach": 1, "num_heavy": 2, "num_clusters": 3, "exact_up_to": 0, **BUCKETS},
        {"block_size": 3, "reach": 4, "num_heavy": 0, "num_clusters": 2, "exact_up_to": 9, **SLOPES},
        {"block_size": 8, "reach": 1, "num_heavy": 2, "num_clusters": 3, "exact_up_to": 0, **BUCKETS, **TRITON},
    ],
    "kernelized": [{}, {"kernel": "laplace"}],
    "skyformer": [
        {"num_landmarks": 6},
        {"num_landmarks": 5, "pinv": "ridge"},
        {"num_landmarks": 6, "kernel": "matern52"},
        {"num_landmarks": 6, **TRITON},
    ],
    "skyformer_softmax": [{"num_landmarks": 6}, {"num_landmarks": 5, "pinv": "ridge"}],
    "linear": [{}],
    "performer": [{"num_features": 6}],
    "linformer": [
        {"num_features": 5, "max_length": 2048},
        {"num_features": 5, "max_length": 2048, "per_head": True, "share_key_value": True},
    ],
    "informer": [{"num_queries": 5, "num_samples": 7}],
    "reformer": [
        {"num_hashes": 2, "chunk_size": 4, "num_buckets": 4},
        {"num_hashes": 3, "chunk_size": 3, "num_buckets": 2, "across_buckets": True},
        {"num_hashes": 2, "chunk_size": 4, "num_buckets": 4, "shared_qk": False},
    ],
    "longformer": [{"window": 5}, {"window": 3, "num_global": 2}],
    "bigbird": [
        {"block_size": 2, "num_random_blocks": 1},
        {"block_size": 1, "num_random_blocks": 2},
        {"block_size": 2, "num_random_blocks": 0},
    ],
}


# Methods whose rule is about positions: holes inside a sequence count as positions.
POSITIONAL = {name for name, method in METHODS.items() if method.positional}


def is_cross(name, options):
    """Whether queries and keys may be different tokens."""
    return METHODS[name].cross_attention and not any(options.get(each) for each in (*CALLED, "num_selected"))


RANDOM = [
    ("nystrom", {"num_landmarks": 5, "landmarks": "uniform"}),
    ("skyformer", {"num_landmarks": 6}),
    ("skyformer", {"num_landmarks": 6, **TRITON}),
    ("skyformer_softmax", {"num_landmarks": 6}),
    ("performer", {"num_features": 6}),
    ("bigbird", {"block_size": 2, "num_random_blocks": 1}),
    ("informer", {"num_queries": 5, "num_samples": 7}),
    ("reformer", {"num_hashes": 2, "chunk_size": 4, "num_buckets": 4}),
]
# Options under which a Module draws in training; the functions draw without them.
TRAINING = {"performer": {"redraw_steps": 1}}
# The papers' baseline stores n x s numbers by design; it keeps every other law.
QUADRATIC_BY_DESIGN = ("softmax", {"form": "materialised"})

CASES = [
    pytest.param(name, options, id=f"{name}-{options}") for name in METHODS for options in VARIANTS.get(name, [{}])
]
every_case = pytest.mark.parametrize(("name", "options"), CASES)
# For tests of seconds per case: a method's first options without and with a mask, its others with one.
every_case_masked = pytest.mark.parametrize(
    ("name", "options", "masked"),
    [
        pytest.param(name, options, masked, id=f"{case.id}-{'masked' if masked else 'open'}")
        for case in CASES
        for name, options in (case.values,)
        for masked in (False, True)
        if masked or options == VARIANTS[name][0]
    ],
)
# A compiler takes seconds: the fast tests try it with the first options of the library's own methods.
COMPILED = [("nystrom", VARIANTS["nystrom"][0]), ("near_far", VARIANTS["near_far"][0])]
compiled_cases_masked = pytest.mark.parametrize(
    ("name", "options", "masked"),
    [
        pytest.param(name, options, masked, id=case.id, marks=[pytest.mark.long] * ((name, options) not in COMPILED))
        for case in every_case_masked.args[1]
        for name, options, masked in (case.values,)
    ],
)
# Kernels are interpreted without a GPU, which is slow: one case stands for all.
cases_of_torch = pytest.mark.parametrize(
    ("name", "options"), [case for case in CASES if "backend" not in case.values[1]]
)
cases_with_one_of_triton = pytest.mark.parametrize(
    ("name", "options"),
    [case for case in CASES if "backend" not in case.values[1] or case.values[0] == "skyformer"],
)
# float64 rounding through an inverse whose condition is a few thousand.
CLOSE = {"rtol": 1e-8, "atol": 1e-9}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
lengths = st.integers(1, 40)
seeds = st.integers(0, 2**31)
# Interpreted kernels take a second per call, so they get only these examples.
BY_HAND = (
    {
        "n": 23,
        "s": 18,
        "b": 1,
        "h": 2,
        "d": 3,
        "e": 5,
        "before": 2,
        "after": 9,
        "junk": float("nan"),
        "count": 7,
        "words": 3,
        "sizes": [3, 0, 17, 16, 9],
    },
    {
        "sizes": [4, 11],
        "n": 9,
        "s": 31,
        "b": 2,
        "h": 1,
        "d": 9,
        "e": 1,
        "before": 6,
        "after": 0,
        "junk": -1e30,
        "count": 12,
        "words": 5,
    },
)


@pytest.fixture(autouse=True)
def triton_where_it_is_asked_for(request):
    parameters = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    if any(isinstance(value, dict) and value.get("backend") == "triton" for value in parameters.values()):
        pytest.importorskip("triton")


# On a CPU, these take torch's operators, on threads of our own, as large inputs do; the others our own loops.
ON_THREADS = [VARIANTS["nystrom"][1], VARIANTS["near_far"][1], VARIANTS["near_far"][6]]
# These take the loops that attend from many tokens to few, and from few to many, also for small inputs.
IN_LOOPS = [
    VARIANTS[name][0] for name in ("softmax", "nystrom", "skyformer_softmax", "performer", "linformer", "informer")
]

# Threads of our own take a few heads each of these, as of large inputs.
BY_HEADS = [
    VARIANTS["linear"][0],
    VARIANTS["informer"][0],
    VARIANTS["performer"][0],
    *(VARIANTS[name][1] for name in ("skyformer", "skyformer_softmax", "reformer", "longformer", "bigbird")),
]


@pytest.fixture(autouse=True)
def on_threads_where_large_inputs_are(request, monkeypatch):
    parameters = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    options = [value for value in parameters.values() if isinstance(value, dict)]
    if any(value in ON_THREADS for value in options):
        monkeypatch.setenv("NYSTROM_NATIVE", "0")
    if any(value in ON_THREADS + BY_HEADS for value in options):
        monkeypatch.setattr("nystrom.attention.parts.stretches._WORTH", 0)
        # The fixture `same_threads` of all tests puts the number back.
        torch.set_num_threads(3)
    if any(value in IN_LOOPS for value in options):
        monkeypatch.setattr("nystrom.native._MANY", 1)
        monkeypatch.setattr("nystrom.attention.fused._LEAST_QUERIES", 1)


def few(law):
    """Check a law on a dozen drawn examples, fewer under the profile "few", and for kernels on those chosen by hand."""
    drawn = settings(max_examples=min(12, settings().max_examples), deadline=None)(law)
    by_hand = law.hypothesis.inner_test
    wanted = inspect.signature(by_hand).parameters

    def hold(name, options):
        if options.get("backend") != "triton":
            return drawn(name, options)
        for seed, chosen in enumerate(BY_HAND):
            by_hand(name, options, **{key: value for key, value in {**chosen, "seed": seed}.items() if key in wanted})

    def law_of_options(name, options):
        hold(name, options)

    def law_of_backend(name, backend):
        hold(name, backend)

    return law_of_backend if "backend" in wanted else law_of_options


def draw(seed, n, s=None, *, b=2, h=2, d=4, e=3, dtype=torch.float64, size=1.0):
    g = torch.Generator().manual_seed(seed)
    s = n if s is None else s
    shapes = (b, h, n, d), (b, h, s, d), (b, h, s, e)
    drawn = (torch.randn(shape, generator=g, dtype=torch.float64, device="cpu") for shape in shapes)
    return [(size * x).to(DEVICE, dtype) for x in drawn]


def draw_keep(seed, b, n):
    """Masks with holes, padding at both ends, and at least one real token each."""
    g = torch.Generator().manual_seed(seed + 1)
    keep = torch.rand(b, n, generator=g, device="cpu") < 0.7
    for row, real in enumerate(torch.randint(n, (b,), generator=g, device="cpu").tolist()):
        keep[row, real] = True
    return keep.to(DEVICE)


class Called(torch.nn.Module):
    """A method in its causal form, or with a bias, in every call."""

    def __init__(self, attend, **called):
        super().__init__()
        self.attend, self.weights, self.called = attend, attend.weights, called
        self.method, self.options, self.num_heads = attend.method, attend.options, attend.num_heads
        self.method += " causal" if "is_causal" in called else " biased"

    def forward(self, q, k, v, *, keep=None, key_keep=None, query_keep=None, cu_seqlens=None, skip=None):
        masks = {"keep": keep, "key_keep": key_keep, "query_keep": query_keep, "cu_seqlens": cu_seqlens}
        return self.attend(q, k, v, **masks, skip=skip, **self.called)

    def _apply(self, fn, recurse=True):
        if "bias" in self.called:
            bias = self.called["bias"]
            self.called["bias"] = type(bias)(
                fn(bias.weight if isinstance(bias, Buckets) else bias.slopes),
                **({"max_distance": bias.max_distance} if isinstance(bias, Buckets) else {}),
            )
        return super()._apply(fn, recurse)


def called_with(options):
    """Options of a method, and arguments of its calls."""
    called = {name: value for name, value in options.items() if name in CALLED}
    return {name: value for name, value in options.items() if name not in CALLED}, called


def build(name, options, *, h=2, d=4):
    of_method, called = called_with(options)
    attend = build_attention(name, num_heads=h, head_dim=d, **of_method).to(DEVICE)
    if "bias" in called:
        called["bias"] = called["bias"].of_heads([head % 2 for head in range(h)])
    return (Called(attend, **called) if called else attend).eval()


def ones(b, n):
    return torch.ones(b, n, dtype=torch.bool, device=DEVICE)


def across(name, n, s, b=2):
    """Masks that declare cross-attention of real tokens; methods whose rule counts no positions need none."""
    return {"key_keep": ones(b, s)} if name in POSITIONAL and n != s else {}


def dense_softmax(q, k, v, bias=None, place=None):
    return torch.softmax(q @ k.mT / q.shape[-1] ** 0.5 + pairs_of(bias, q, place), dim=-1) @ v


def pairs_of(bias, q, place=None):
    """The bias of all pairs of tokens (h, n, n)."""
    if bias is None:
        return 0.0
    place = torch.arange(q.shape[-2], device=DEVICE) if place is None else place
    return torch.stack([bias.at_distance(each, place - place[:, None]) for each in bias.weight]).to(q.dtype)


def dense_causal(q, k, v):
    scores = q @ k.mT / q.shape[-1] ** 0.5
    return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf).softmax(dim=-1) @ v


def dense_gaussian(q, k, v):
    distance = (q[..., :, None, :] - k[..., None, :, :]).square().sum(-1)
    return torch.exp(-0.5 * distance / q.shape[-1] ** 0.5) @ v


def distances(q, k):
    return (q[..., :, None, :] - k[..., None, :, :]).norm(dim=-1) / q.shape[-1] ** 0.25


def dense_laplace(q, k, v):
    return torch.exp(-distances(q, k)) @ v


def dense_matern(q, k, v):
    x = 5**0.5 * distances(q, k)
    return (1 + x + x.square() / 3) * torch.exp(-x) @ v


def dense_softmax_with_zeros(q, k, v):
    k, v = (torch.nn.functional.pad(x, (0, 0, 0, 80 - x.shape[-2])) for x in (k, v))
    return dense_softmax(q, k, v)


def dense_softmax_over_others(q, k, v):
    if q.shape[-2] == 1:
        return v
    scores = q @ torch.nn.functional.normalize(q, dim=-1).mT
    return scores.masked_fill(torch.eye(q.shape[-2], dtype=torch.bool, device=DEVICE), -torch.inf).softmax(dim=-1) @ v


def dense_elu(q, k, v):
    q, k = (torch.where(x > 0, 1 + x, x.exp()) for x in (q, k))
    return torch.nn.functional.normalize(q @ k.mT, p=1, dim=-1) @ v


def dense_random_features(q, k, v):
    rows = draw_projection(6, q.shape[-1], generator=torch.Generator().manual_seed(3)).double()
    q, k = (x / x.shape[-1] ** 0.25 for x in (q, k))
    q, k = (torch.exp(x @ rows.mT - 0.5 * x.square().sum(-1, keepdim=True)) for x in (q, k))
    return torch.nn.functional.normalize(q @ k.mT, p=1, dim=-1) @ v


def identity_projections(module):
    for weight in module.parameters():
        torch.nn.init.eye_(weight.data[0])


# Functions that set a module's weights to those of its exact limit.
EXACT_WEIGHTS = {
    "linformer": identity_projections,
    "performer": lambda module: module.weights.redraw(torch.Generator().manual_seed(3)),
}


def build_exact(name, backend):
    options, oracle = EXACT[name]
    attend = build(name, {**options, **backend})
    EXACT_WEIGHTS.get(name, lambda module: None)(attend)
    if "bias" in backend:
        return attend, functools.partial(dense_softmax, **backend)
    return attend, dense_causal if backend == CAUSAL else OTHER_KERNELS.get(backend.get("kernel"), oracle)


def test_every_method_has_its_variants():
    assert set(VARIANTS) == set(METHODS) == set(EXACT)


@every_case
def test_the_module_is_the_function(name, options):
    q, k, v = draw(0, 23)
    keep = draw_keep(0, 2, 23)
    attend, method = build(name, options), METHODS[name]
    weights = () if attend.weights is None else attend.weights()
    options = {option: value for option, value in options.items() if option not in method.weight_options}
    expected = FUNCTIONS[name](q, k, v, *weights, keep=keep, **options)
    torch.testing.assert_close(attend(q, k, v, keep=keep), expected, rtol=0, atol=0)


# Law 1: any length.


@pytest.mark.law(1)
@every_case
@few
@given(
    n=lengths, s=lengths, b=st.integers(1, 3), h=st.integers(1, 3), d=st.integers(1, 9), e=st.integers(1, 9), seed=seeds
)
def test_any_length(name, options, n, s, b, h, d, e, seed):
    s = s if is_cross(name, options) else n
    q, k, v = draw(seed, n, s, b=b, h=h, d=d, e=e)
    out = build(name, options, h=h, d=d)(q, k, v, **across(name, n, s, b))
    assert out.shape == (b, h, n, e)
    assert out.dtype == v.dtype
    assert out.isfinite().all()


@pytest.mark.law(1)
@every_case
@pytest.mark.parametrize(("b", "n", "s"), [(0, 9, 9), (2, 0, 0), (2, 9, 0), (2, 0, 9)])
def test_no_sequence_no_query_or_no_key_gives_an_empty_result_or_zeros(name, options, b, n, s):
    if not is_cross(name, options) and n != s:
        pytest.skip("self-attention only")
    inputs = [x.requires_grad_() for x in draw(0, n, s, b=b)]
    masked = {"keep": ones(b, n)} if n == s else {"key_keep": ones(b, s)}
    for masks in (across(name, n, s, b), masked):
        out = build(name, options)(*inputs, **masks)
        out.sum().backward()
        assert out.shape == (b, 2, n, 3)
        assert not out.any()


# Law 2: what a masked token holds, and padding, change nothing.


@pytest.mark.law(2)
@every_case
@few
@given(n=lengths, seed=seeds, junk=st.sampled_from([float("nan"), float("inf"), -1e30, 3.0]))
def test_what_a_masked_token_holds_changes_nothing(name, options, n, seed, junk):
    keep = draw_keep(seed, 2, n)
    attend = build(name, options)
    results = []
    for content in (0.0, junk):
        inputs = [x.masked_fill(~keep[:, None, :, None], content).requires_grad_() for x in draw(seed, n)]
        out = attend(*inputs, keep=keep)
        out.square().sum().backward()
        results.append([out.detach(), *(x.grad for x in inputs)])
    for clean, soiled in zip(*results, strict=True):
        torch.testing.assert_close(soiled, clean, rtol=0, atol=0)
        assert not soiled[(~keep)[:, None].expand(soiled.shape[:3])].any()


@pytest.mark.law(2)
@every_case
@few
@given(n=lengths, before=st.integers(0, 30), after=st.integers(0, 30), seed=seeds)
def test_padding_changes_nothing(name, options, n, before, after, seed):
    inputs = draw(seed, n, b=1)
    padded = [torch.nn.functional.pad(x, (0, 0, before, after), value=7.0) for x in inputs]
    keep = torch.nn.functional.pad(torch.ones(1, n, dtype=torch.bool, device=DEVICE), (before, after))
    attend = build(name, options)
    out = attend(*padded, keep=keep)
    torch.testing.assert_close(out[:, :, before : before + n], attend(*inputs), **CLOSE)


@pytest.mark.law(2)
@every_case
@few
@given(n=lengths, words=st.integers(1, 6), before=st.integers(0, 30), after=st.integers(0, 30), seed=seeds)
# A matrix of landmarks with singular values at the edge of rounding.
@example(n=38, words=2, before=6, after=19, seed=166)
# Centres of clusters that are equal up to rounding.
@example(n=30, words=5, before=0, after=0, seed=42)
@example(n=20, words=2, before=0, after=0, seed=35761)
def test_padding_changes_nothing_where_tokens_repeat(name, options, n, words, before, after, seed):
    """Equal keys are equal up to rounding, which padding changes: what is chosen among them must not hang on it."""
    token = torch.randint(words, (n,), generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    inputs = [x[:, :, token] for x in draw(seed, words, b=1)]
    # Values differ, so that another choice among equal keys would be seen.
    inputs[2] = draw(seed + 1, n, b=1)[2]
    padded = [torch.nn.functional.pad(x, (0, 0, before, after), value=7.0) for x in inputs]
    keep = torch.nn.functional.pad(torch.ones(1, n, dtype=torch.bool, device=DEVICE), (before, after))
    attend = build(name, options)
    out = attend(*padded, keep=keep)
    torch.testing.assert_close(out[:, :, before : before + n], attend(*inputs), **CLOSE)


@pytest.mark.law(2)
@every_case
@few
@given(n=lengths, before=st.integers(0, 30), after=st.integers(0, 30), seed=seeds)
def test_padding_changes_nothing_where_scores_are_equal(name, options, n, before, after, seed):
    """Distances and scores of tokens of plus and minus one are equal up to rounding: no choice must hang on it."""
    inputs = [x.sign() for x in draw(seed, n, b=1)]
    inputs[2] = draw(seed + 1, n, b=1)[2]
    padded = [torch.nn.functional.pad(x, (0, 0, before, after), value=7.0) for x in inputs]
    keep = torch.nn.functional.pad(torch.ones(1, n, dtype=torch.bool, device=DEVICE), (before, after))
    attend = build(name, options)
    out = attend(*padded, keep=keep)
    torch.testing.assert_close(out[:, :, before : before + n], attend(*inputs), **CLOSE)


@pytest.mark.law(2)
@every_case
@few
@given(n=lengths, s=lengths, before=st.integers(0, 30), after=st.integers(0, 30), seed=seeds)
def test_padding_of_queries_and_keys_apart_changes_nothing(name, options, n, s, before, after, seed):
    if not is_cross(name, options):
        pytest.skip("self-attention only")
    q, k, v = draw(seed, n, s, b=1)
    pad = torch.nn.functional.pad
    key_keep, query_keep = pad(ones(1, s), (before, after)), pad(ones(1, n), (after, before))
    attend = build(name, options)
    out = attend(
        pad(q, (0, 0, after, before), value=7.0),
        *(pad(x, (0, 0, before, after), value=7.0) for x in (k, v)),
        key_keep=key_keep,
        query_keep=query_keep,
    )
    # Without a mask a rule about positions would take them for the same tokens.
    expected = attend(q, k, v, **({"key_keep": ones(1, s)} if name in POSITIONAL else {}))
    torch.testing.assert_close(out[:, :, after : after + n], expected, **CLOSE)


@pytest.mark.law(2)
@every_case
@few
@given(n=lengths, seed=seeds)
def test_holes_change_nothing(name, options, n, seed):
    if name in POSITIONAL or "bias" in options:
        pytest.skip("holes count as positions")
    keep = draw_keep(seed, 1, n)
    inputs = draw(seed, n, b=1)
    attend = build(name, options)
    torch.testing.assert_close(
        attend(*inputs, keep=keep)[:, :, keep[0]], attend(*(x[:, :, keep[0]] for x in inputs)), **CLOSE
    )


@pytest.mark.law(2)
@every_case
@pytest.mark.parametrize("n", [19, 20, 21])
def test_masks_of_cross_attention_do_not_look_at_lengths(name, options, n):
    """Equal numbers of queries and keys are not special: each query has the same result among 19, 20 or 21."""
    if not is_cross(name, options):
        pytest.skip("self-attention only")
    q, k, v = draw(3, 21, 20)
    keep, attend = draw_keep(3, 2, 20), build(name, options)
    queries = ones(2, 21)
    queries[:, n:] = False
    expected = attend(q, k, v, key_keep=keep, query_keep=queries)[:, :, :n]
    torch.testing.assert_close(attend(q[:, :, :n], k, v, key_keep=keep), expected, **CLOSE)


@pytest.mark.law(2)
@every_case
@pytest.mark.parametrize("junk", [float("nan"), 1e30])
@pytest.mark.parametrize("self_attention", [True, False])
def test_what_padding_holds_reaches_no_gradient_of_a_layer(name, options, junk, self_attention):
    """Neither inputs nor weights: a projection sums over all tokens."""
    if not self_attention and not is_cross(name, options):
        pytest.skip("self-attention only")
    options, called = called_with(options)
    layer = MultiheadAttention(8, 2, method=name, self_attention=self_attention, dtype=torch.float64, **options).eval()
    layer, keep, results = layer.to(DEVICE), draw_keep(8, 2, 17), []
    for content in (0.0, junk):
        x = draw(8, 17, h=1, d=8)[0][:, 0].masked_fill(~keep[..., None], content).requires_grad_()
        masks = {"key_padding_mask": ~keep} | ({} if self_attention else {"query_padding_mask": ~keep})
        out = layer(x, x, x, **masks, **called)[0][keep]
        layer.zero_grad()
        out.square().sum().backward()
        results.append([out.detach(), x.grad, *(weight.grad for weight in layer.parameters())])
    for clean, soiled in zip(*results, strict=True):
        torch.testing.assert_close(soiled, clean, rtol=0, atol=0)


# Law 3: the rest of the batch changes nothing.


@pytest.mark.law(3)
@every_case
@few
@given(n=lengths, seed=seeds)
def test_the_rest_of_the_batch_changes_nothing(name, options, n, seed):
    inputs = draw(seed, n, b=3)
    inputs[0][1] *= 50
    keep = draw_keep(seed, 3, n)
    attend = build(name, options)
    together = attend(*inputs, keep=keep)
    for i in range(3):
        alone = attend(*(x[i : i + 1] for x in inputs), keep=keep[i : i + 1])
        torch.testing.assert_close(together[i : i + 1], alone, **CLOSE)


@pytest.mark.law(3)
@every_case
@few
@given(n=lengths, words=st.integers(1, 6), seed=seeds)
def test_the_rest_of_the_batch_changes_nothing_where_tokens_repeat(name, options, n, words, seed):
    token = torch.randint(words, (n,), generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    inputs = [x[:, :, token] for x in draw(seed, words, b=3)]
    inputs[2] = draw(seed + 1, n, b=3)[2]
    inputs[0][1] *= 50
    keep = draw_keep(seed, 3, n)
    attend = build(name, options)
    together = attend(*inputs, keep=keep)
    for i in range(3):
        alone = attend(*(x[i : i + 1] for x in inputs), keep=keep[i : i + 1])
        torch.testing.assert_close(together[i : i + 1], alone, **CLOSE)


@pytest.mark.law(3)
@cases_of_torch
def test_a_neighbour_that_is_not_a_number_changes_nothing(name, options):
    clean = draw(19, 24, b=3)
    soiled = [x.clone() for x in clean]
    soiled[0][1] = torch.nan
    attend, results = build(name, options), []
    for inputs in (clean, soiled):
        inputs = [x.requires_grad_() for x in inputs]
        out = attend(*inputs)[[0, 2]]
        out.square().sum().backward()
        results.append([out.detach(), *(x.grad[[0, 2]] for x in inputs)])
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y, **CLOSE)


@pytest.mark.law(3)
@every_case
@few
@given(sizes=st.lists(st.integers(0, 25), min_size=1, max_size=6), seed=seeds)
@example(sizes=[0], seed=0)
# Sequences of one length, and of about one, attend in one call.
@example(sizes=[20, 20, 19, 1, 20, 18], seed=1)
# A logarithm of skyformer_softmax that is 0 up to rounding.
@example(sizes=[14, 25, 21, 9], seed=1426772)
def test_packed_sequences_are_each_alone(name, options, sizes, seed):
    attend, edges = build(name, options), [0, *itertools.accumulate(sizes)]
    results = []
    for packed in (True, False):
        inputs = [x.requires_grad_() for x in draw(seed, edges[-1], b=1)]
        if packed:
            out = attend(*inputs, cu_seqlens=torch.tensor(edges, device=DEVICE))
        else:
            found = [attend(*(x[:, :, a:b] for x in inputs)) for a, b in itertools.pairwise(edges)]
            out = torch.cat(found, dim=2)
        out.square().sum().backward()
        results.append([out.detach(), *(x.grad for x in inputs)])
    for ours, alone in zip(*results, strict=True):
        torch.testing.assert_close(ours, alone, **CLOSE)


@pytest.mark.law(3)
@pytest.mark.refuses
@every_case
def test_packed_sequences_that_are_none_are_refused(name, options):
    q, k, v = draw(0, 6, b=1)
    attend = build(name, options)
    for came, says in (
        ([0, 3], r"cu_seqlens is \[0, 3\].*end at 6 tokens"),
        ([1, 6], "expected to begin at 0"),
        ([0, 4, 2, 6], "never to decrease"),
        ([], r"cu_seqlens is \[\]"),
    ):
        with pytest.raises(ValueError, match=says):
            attend(q, k, v, cu_seqlens=torch.tensor(came, dtype=torch.long, device=DEVICE))
    edges = torch.tensor([0, 3, 6], device=DEVICE)
    with pytest.raises(ValueError, match=r"batch of 2; expected 1"):
        attend(*draw(0, 6), cu_seqlens=edges)
    with pytest.raises(ValueError, match=r"cu_seqlens is given, and keep"):
        attend(q, k, v, cu_seqlens=edges, keep=ones(1, 6))
    with pytest.raises(ValueError, match=r"cu_seqlens is given inside torch\.compile"):
        torch.func.vmap(lambda x: attend(x[None], k, v, cu_seqlens=edges))(q)


# Law 4: the exact limit.

EXACT = {
    "softmax": ({}, dense_softmax),
    "nystrom": ({"num_landmarks": 12}, dense_softmax),
    "near_far": ({"num_heavy": 40, "block_size": 4, "reach": 1, "num_clusters": 3, "exact_up_to": 0}, dense_softmax),
    "kernelized": ({}, dense_gaussian),
    "skyformer": ({"num_landmarks": 12}, dense_gaussian),
    "skyformer_softmax": ({"num_landmarks": 12}, dense_softmax),
    "linear": ({}, dense_elu),
    "performer": ({"num_features": 6}, dense_random_features),
    "linformer": ({"num_features": 80, "max_length": 80}, dense_softmax_with_zeros),
    "informer": ({"num_queries": 40}, dense_softmax),
    "reformer": ({"num_buckets": 1, "chunk_size": 40}, dense_softmax_over_others),
    "longformer": ({"window": 59}, dense_softmax),
    "bigbird": ({"block_size": 5, "num_random_blocks": 2}, dense_softmax),
}
OTHER_KERNELS = {"laplace": dense_laplace, "matern52": dense_matern}
EXACT_CASES = [
    *((name, {}) for name in METHODS),
    ("kernelized", {"kernel": "laplace"}),
    ("skyformer", {"kernel": "matern52"}),
    ("nystrom", TRITON),
    ("near_far", TRITON),
    ("near_far", CAUSAL),
    ("near_far", BUCKETS),
    ("near_far", SLOPES),
    ("softmax", BUCKETS),
    ("skyformer", TRITON),
]
every_exact_case = pytest.mark.parametrize(("name", "backend"), EXACT_CASES, ids=str)


@pytest.mark.law(4)
@every_exact_case
@few
@given(count=st.integers(1, 12), seed=seeds)
def test_the_exact_limit_is_met(name, backend, count, seed):
    attend, oracle = build_exact(name, backend)
    q, k, v = draw(seed, count)
    # float64 rounding of a softmax
    torch.testing.assert_close(attend(q, k, v), oracle(q, k, v), rtol=1e-10, atol=1e-12)


@pytest.mark.law(4)
@every_exact_case
@few
@given(count=st.integers(1, 12), seed=seeds)
def test_a_short_sequence_among_long_ones_is_exact(name, backend, count, seed):
    attend, oracle = build_exact(name, backend)
    inputs = draw(seed, 30, b=2)
    keep = torch.ones(2, 30, dtype=torch.bool, device=DEVICE)
    keep[0] = torch.arange(30, device=DEVICE) % 30 < count
    keep[0] = keep[0][torch.randperm(30, generator=torch.Generator().manual_seed(seed), device="cpu").to(DEVICE)]
    out = attend(*inputs, keep=keep)[0, :, keep[0]]
    if "bias" in backend:
        # Holes count as positions.
        oracle = functools.partial(oracle, place=keep[0].nonzero()[:, 0])
    torch.testing.assert_close(out, oracle(*(x[0, :, keep[0]] for x in inputs)), rtol=1e-10, atol=1e-12)


@pytest.mark.law(4)
@every_case
def test_gradients_of_a_short_sequence_do_not_see_the_long_ones(name, options):
    together, keep = draw(16, 30), torch.ones(2, 30, dtype=torch.bool, device=DEVICE)
    keep[0, 2:] = False
    alone = [x[:1, :, :2].clone().requires_grad_() for x in together]
    together = [x.requires_grad_() for x in together]
    attend = build(name, options)
    attend(*together, keep=keep).square().sum().backward()
    attend(*alone).square().sum().backward()
    for x, y in zip(together, alone, strict=True):
        assert x.grad.isfinite().all()
        torch.testing.assert_close(x.grad[:1, :, :2], y.grad, **CLOSE)


@pytest.mark.law(4)
@pytest.mark.parametrize(("name", "backend"), [case for case in EXACT_CASES if is_cross(*case)], ids=str)
@pytest.mark.parametrize(("n", "s"), [(5, 40), (40, 5)])
def test_few_queries_or_few_keys_are_exact(name, backend, n, s):
    attend, oracle = build_exact(name, backend)
    q, k, v = draw(0, n, s)
    torch.testing.assert_close(attend(q, k, v, **across(name, n, s)), oracle(q, k, v), rtol=1e-10, atol=1e-12)
    q, k, v = draw(0, n + 30, s + 30)
    key_keep, query_keep = (torch.nn.functional.pad(ones(2, size), (30, 0)) for size in (s, n))
    out = attend(q, k, v, key_keep=key_keep, query_keep=query_keep)[:, :, 30:]
    torch.testing.assert_close(out, oracle(*(x[:, :, 30:] for x in (q, k, v))), rtol=1e-10, atol=1e-12)


# Law 5: dtypes, autocast, finiteness, no real token.


@pytest.mark.law(5)
@every_case
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-4), (torch.bfloat16, 6e-2), (torch.float16, 8e-3)])
def test_low_precision_stays_near_float64(name, options, dtype, tolerance):
    if (name, options) == ("nystrom", {"num_landmarks": 5, "landmarks": "kmeans"}) and dtype != torch.float32:
        options = {"num_landmarks": 5}  # rounding moves a token to another cluster: another result, not an error
    # Inputs that the low dtype can hold, so that only the method's own rounding counts; a few rounding steps
    # (2^-24, 2^-8, 2^-11) through an inverse.
    q, k, v = draw(3, 60, dtype=dtype)
    keep = draw_keep(3, 2, 60)
    attend = build(name, options)
    out = attend(q, k, v, keep=keep)
    expected = attend(q.double(), k.double(), v.double(), keep=keep)
    assert out.dtype == dtype
    assert (out.double() - expected).norm() <= tolerance * expected.norm()


def formula_of(attend, inputs, keep=None, key_keep=None, query_keep=None):
    """The plain formula of a Module for one sequence and head, with what it draws and chooses for that sequence."""
    name, options, device = attend.method, attend.options, torch.device(DEVICE)

    def batch(*tensors):
        return [x[None, None] for x in tensors]

    def inverse(a):
        if options.pinv == "iterative":
            return reference.iterative_inverse(a, options.pinv_steps)
        return pinv(a[None, None], inverse=options.pinv, steps=options.pinv_steps)[0, 0]

    def nystrom(q, k, v, b, h, places):
        def landmarks(x, m):
            if options.landmarks == "segment_means":
                return reference.segment_means(x, m)
            found = kmeans(x[None, None], m) if options.landmarks == "kmeans" else None
            return (uniform(x[None, None], m, draws=draw_numbers(m, None, device)) if found is None else found)[0, 0]

        def of_all_heads(_):
            """The inverse if the start value depends on all heads of a sequence."""
            marks = (
                segment_means(x[b : b + 1], options.num_landmarks, keep=None if keep is None else keep[b : b + 1])
                for x in inputs[:2]
            )
            left, right = marks
            a = torch.softmax(q.shape[1] ** -0.5 * left @ right.mT, dim=-1)
            return pinv(a.to(q.dtype), steps=options.pinv_steps, z0=options.z0)[0, h]

        inverted = of_all_heads if options.z0 == "sequence" else inverse
        return reference.nystrom(q, k, v, num_landmarks=options.num_landmarks, landmarks=landmarks, inverse=inverted)

    def skyformer(q, k, v, *_):
        marks = mixed_landmarks(*batch(q, k), None, None, draw_numbers(options.num_landmarks, None, device))[0, 0]
        ridged = functools.partial(reference.ridged_inverse, gamma=options.gamma, inverse=inverse)
        if name == "skyformer_softmax":
            return reference.skyformer_softmax(q, k, v, landmarks=marks.to(q.dtype), inverse=ridged)
        return reference.skyformer(q, k, v, landmarks=marks.to(q.dtype), inverse=ridged, kernel=options.kernel)

    is_self = inputs[0].shape[2] == inputs[1].shape[2]

    def near_far(q, k, v, b, h, places):
        m = options.num_clusters
        if is_self and len(k) <= options.exact_up_to:
            return reference.softmax(q, k, v)
        chosen = choose(*batch(q, k), None, None, options).cluster[0, 0]
        near = reference.near_keys(places, places, block_size=options.block_size, reach=options.reach)
        if options.num_selected and len(k) > max(options.num_heavy, m, options.num_selected, options.block_size):
            sizes = {"num_clusters": m, "block_size": options.block_size, "num_selected": options.num_selected}
            near = near | reference.selected_keys(q, k, v, cluster=chosen, near=near, places=places, **sizes)
        return reference.near_far(q, k, v, cluster=chosen, num_clusters=m, near=near if is_self else None)

    def near_far_biased(q, k, v, b, h, places):
        bias, m, size = attend.called["bias"], options.num_clusters, options.block_size
        between = functools.partial(bias.at_distance, bias.weight[h].to(q.dtype))
        if len(k) <= max(options.exact_up_to, m):
            return reference.softmax_with_bias(q, k, v, bias=between(places - places[:, None]))
        far = reference.far_bias(
            between, places, block_size=size, reach=options.reach, by_sides=bias.furthest is not None
        )
        return reference.near_far_with_bias(
            q, k, v, cluster=choose(*batch(q, k), None, None, options).cluster[0, 0], num_clusters=m,
            near=reference.near_keys(places, places, block_size=size, reach=options.reach),
            bias=between(places - places[:, None]), far=far,
        )  # fmt: skip

    def softmax_biased(q, k, v, b, h, places):
        bias = attend.called["bias"]
        pairs = bias.at_distance(bias.weight[h].to(q.dtype), places - places[:, None])
        return reference.softmax_with_bias(q, k, v, bias=pairs)

    def near_far_causal(q, k, v, b, h, places):
        """Holes count as positions, so that tokens are put where they are, among zeros that are not real."""
        n, size, exact = places[-1].item() + 1, options.block_size, options.exact_up_to // options.block_size
        real = torch.zeros(1, n, 1, dtype=k.dtype, device=device).index_fill(1, places, 1)
        queries, keys = (torch.zeros_like(x[:1]).repeat(n, 1).index_copy(0, places, x.detach()) for x in (q, k))
        # Values that are the rows of the identity say who is in which cluster: choices do not look at values.
        queries, keys, marks, real = (
            pad_to_blocks(x, size)
            for x in (
                q.shape[1] ** -0.5 * queries[None],
                keys[None],
                torch.eye(n, dtype=k.dtype, device=device)[None],
                real,
            )
        )
        real = real[..., 0].bool()
        tokens, means = rows_of(keys, marks, real).split(size, dim=1), mean_queries(queries, real, size)
        past, groups = torch.zeros_like(tokens[0])[:, :1].repeat(1, options.num_clusters + options.num_heavy, 1), []
        for block in range(len(tokens)):
            if block >= 2:
                asked = means[:, max(0, block - QUERY_MEANS) : block]
                past = advance(past, tokens[block - 2], asked, options, n)
            member = past[0, :, k.shape[1] :][:, places]
            group = torch.where(member.any(dim=0), member.argmax(dim=0), -1)
            groups.append(torch.full_like(group, -1) if block < exact else group)
        blocks = places.div(size, rounding_mode="floor")
        return reference.near_far_causal(q, k, v, groups=torch.stack(groups)[blocks])

    def linformer(q, k, v, b, h, places):
        of_keys, of_values = (weight[h % len(weight)].to(k.dtype) for weight in attend.weights())
        return reference.linformer(q, k, v, of_keys=of_keys, of_values=of_values, places=places)

    def informer(q, k, v, *_):
        sample = sample_keys(k[None, None], None, draw_numbers(options.num_samples, None, device))[0]
        return reference.informer(q, k, v, num_queries=options.num_queries, sample=sample)

    def reformer(q, k, v, b, h, places):
        rotations = draw_rotations(torch.empty(1, attend.num_heads, 1, q.shape[1], device=device), options, None)
        return reference.reformer(
            q, k, v, rotations=rotations[:, h].to(q.dtype), chunk_size=options.chunk_size, shared_qk=options.shared_qk,
            across_buckets=options.across_buckets,
        )  # fmt: skip

    def bigbird(q, k, v, b, h, places):
        draws = draw_numbers(attend.num_heads * options.num_random_blocks, None, device).view(attend.num_heads, -1)
        return reference.bigbird(q, k, v, block_size=options.block_size, draws=draws[h], places=places)

    return {
        "softmax": lambda q, k, v, *_: reference.softmax(q, k, v),
        "nystrom": nystrom,
        "near_far": near_far,
        "near_far biased": near_far_biased,
        "softmax biased": softmax_biased,
        "near_far causal": near_far_causal,
        "kernelized": lambda q, k, v, *_: reference.kernelized(q, k, v, kernel=options.kernel),
        "skyformer": skyformer,
        "skyformer_softmax": skyformer,
        "linear": lambda q, k, v, *_: reference.linear(q, k, v),
        "performer": lambda q, k, v, *_: reference.performer(q, k, v, projection=attend.weights()[0].to(q.dtype)),
        "linformer": linformer,
        "informer": informer,
        "reformer": reformer,
        "longformer": lambda q, k, v, b, h, places: reference.longformer(
            q, k, v, window=options.window, num_global=options.num_global, places=places
        ),
        "bigbird": bigbird,
    }[name]


def plain(attend, *inputs, **masks):
    return reference.by_sequence(formula_of(attend, inputs, **masks), *inputs, **masks)


@every_case
@pytest.mark.parametrize(("n", "s"), [(3, 3), (12, 12), (40, 40), (12, 40), (40, 12)])
@pytest.mark.parametrize("masked", [False, True])
def test_outputs_and_gradients_are_those_of_the_reference(name, options, n, s, masked):
    if n != s and (not is_cross(name, options) or options.get("z0") == "sequence"):
        pytest.skip("self-attention")
    torch.manual_seed(0)  # for the weights of those that have some
    attend, inputs = build(name, options), [x.requires_grad_() for x in draw(4, n, s)]
    masks = {"keep": draw_keep(4, 2, n)} if masked else {}
    if n != s:
        masks = {"key_keep": draw_keep(4, 2, s), "query_keep": draw_keep(5, 2, n)} if masked else across(name, n, s)
    out, expected = attend(*inputs, **masks), plain(attend, *inputs, **masks)
    # float64 rounding through an inverse
    torch.testing.assert_close(out, expected, rtol=1e-8, atol=1e-9)
    grad = draw(5, n)[2]
    ours, theirs = (torch.autograd.grad(x, inputs, grad, allow_unused=True) for x in (out, expected))
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x, torch.zeros_like(x) if y is None else y, rtol=1e-7, atol=1e-8)


def relative_error(found, exact):
    # Values below the range of float32, such as Gaussian sums over distant keys, are not compared.
    error = ((found - exact).norm() / exact.norm().clamp(min=1e-30)).item()
    return error if error == error else float("inf")


@pytest.mark.law(5)
@cases_of_torch
@pytest.mark.parametrize("size", [1, 10, 100])
def test_float32_is_as_near_to_float64_as_the_plain_formula(name, options, size):
    torch.manual_seed(0)  # for the weights of those that have some
    attend = build(name, options, d=16)
    errors, formula = 0.0, 0.0
    for seed in range(3):
        # Scores are inner products over sqrt(d): of that size, where each token has its root.
        q, k, v = draw(seed, 48, b=1, d=16)
        inputs = [x.float() for x in (size**0.5 * q, size**0.5 * k, v)]
        exact = attend(*(x.double() for x in inputs))
        errors += relative_error(attend(*inputs), exact) / 3
        formula += relative_error(plain(attend, *inputs), exact) / 3
    # Another order of the same sums: a few times the error, or a few roundings where the plain formula has almost none.
    assert errors <= 4 * formula + 8 * torch.finfo(torch.float32).eps


@pytest.mark.law(5)
@every_case
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_the_low_dtype(name, options, dtype):
    q, k, v = (x.requires_grad_() for x in draw(4, 30, dtype=torch.float32))
    attend = build(name, options)
    with torch.autocast(DEVICE, dtype=dtype):
        out = attend(q, k, v)
    assert out.dtype == dtype
    torch.testing.assert_close(out, attend(*(x.to(dtype) for x in (q, k, v))), rtol=0, atol=0)
    out.float().sum().backward()
    assert all(x.grad.dtype == torch.float32 and x.grad.isfinite().all() for x in (q, k, v))
    with torch.autocast(DEVICE, dtype=dtype):
        assert attend(*(x.detach()[:0] for x in (q, k, v))).dtype == dtype


@pytest.mark.law(5)
@every_case
@pytest.mark.parametrize(
    ("dtype", "size"),
    [(torch.float64, 1e4), (torch.float32, 1e4), (torch.bfloat16, 1e3), (torch.float16, 100.0), (torch.float32, 0.0)],
)
def test_outputs_and_gradients_are_finite(name, options, dtype, size):
    inputs = [x.requires_grad_() for x in draw(5, 33, dtype=dtype, size=size)]
    out = build(name, options)(*inputs, keep=draw_keep(5, 2, 33))
    assert out.isfinite().all()
    (out / 33).sum().backward()
    assert all(x.grad.isfinite().all() for x in inputs)


@pytest.mark.law(5)
@cases_of_torch
@pytest.mark.parametrize("masked", [False, True])
def test_float16_with_the_skip_is_clipped_where_the_sum_overflows(name, options, masked):
    if options.get("is_causal"):
        pytest.skip("the skip sees later tokens")
    q, k, v = draw(5, 33, dtype=torch.float16)
    v = torch.full_like(v, 6e4).index_fill(2, torch.arange(20, device=DEVICE), -3e4)
    # Sums that overflow, and convolutions that do where the sum does not: 6e4 - 9e4.
    skip = torch.tensor([[0.5] * 3, [-0.5] * 3], dtype=torch.float16, device=DEVICE)[:, None, :, None]
    keep, attend = draw_keep(5, 2, 33) if masked else None, build(name, options)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attend(*leaves, keep=keep, skip=skip)
    (out.float() / 6e4).sum().backward()
    assert out.isfinite().all()
    assert all(x.grad.isfinite().all() for x in leaves)
    # The attention is clipped, too.
    alone = attend(q.float(), k.float(), v.float(), keep=keep).clamp(-65504, 65504)
    expected = depthwise_skip(v.float(), skip.float(), keep=keep, to=alone).clamp(-65504, 65504)
    # Roundings of float16 in numbers of its largest size.
    torch.testing.assert_close(out.float(), expected, rtol=0, atol=200)


@pytest.mark.law(5)
@cases_of_torch
@pytest.mark.parametrize("size", [1e3, 6e4])
def test_tokens_near_the_largest_float16_have_finite_gradients(name, options, size):
    g = torch.Generator().manual_seed(5)
    inputs = [(size * (2 * torch.rand(2, 2, 33, 4, generator=g) - 1)).half().to(DEVICE).requires_grad_() for _ in "qkv"]
    weights = torch.randn(2, 2, 33, 4, generator=g).to(DEVICE)
    out = build(name, options)(*inputs, keep=draw_keep(5, 2, 33))
    assert out.isfinite().all()
    (out.float() * weights / 33).sum().backward()
    assert all(x.grad.isfinite().all() for x in inputs)


def with_outlier(inputs, seed, *, where, whole, size):
    """One entry or a whole token of that size in queries, keys or values; or a value that no query attends to."""
    g = torch.Generator().manual_seed(seed)
    token, channel = (torch.randint(inputs[0].shape[axis], (), generator=g).item() for axis in (2, 3))
    inputs = {name: x.clone() for name, x in zip("qkv", inputs, strict=True)}
    if where == "unwanted":
        # Scores below minus 60 at the token, above minus 10 elsewhere: its weight is below the rounding of the others.
        inputs["q"][..., 0] += 4
        inputs["k"][:, :, token] = 0
        inputs["k"][:, :, token, 0] = -80
    huge = inputs["v" if where == "unwanted" else where]
    huge[:, :, token, slice(None) if whole else channel] = size
    return list(inputs.values())


@pytest.mark.law(5)
@cases_of_torch
@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(2, 40),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    where=st.sampled_from(["q", "k", "v", "unwanted", "every q", "every k", "every q and k", "every q, k and v"]),
    whole=st.booleans(),
    power=st.floats(2, 30),
    masked=st.booleans(),
    seed=seeds,
)
def test_huge_tokens_leave_finite_what_exact_attention_does(name, options, n, dtype, where, whole, power, masked, seed):
    inputs = draw(seed, n, b=1, e=4, dtype=torch.float32)
    size = min(10**power, torch.finfo(dtype).max)
    if where.startswith("every"):
        # Scores up to those of the largest tokens in float16.
        inputs = [min(size, 6e4) * x.clamp(-1, 1) if c in where[6:] else x for c, x in zip("qkv", inputs, strict=True)]
    else:
        inputs = with_outlier(inputs, seed, where=where, whole=whole, size=size)
    inputs, keep = [x.to(dtype) for x in inputs], draw_keep(seed, 1, n) if masked else None
    weights = torch.randn(1, 2, n, 4, generator=torch.Generator().manual_seed(seed + 2)).to(DEVICE)

    def results(attend, inputs):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = attend(*leaves)
        (out.float() * weights / n).sum().backward()
        return out.detach(), *(x.grad for x in leaves)

    torch.manual_seed(seed)  # for the weights of those that have some
    mask, attend = None if keep is None else keep[:, None, None], build(name, options)
    if "bias" in options:
        pairs = pairs_of(options["bias"], inputs[0])
        mask = pairs[None] if mask is None else torch.where(mask, pairs, -torch.inf)
    exact = results(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask), inputs)
    found, wide = (
        results(lambda q, k, v: attend(q, k, v, keep=keep), x) for x in (inputs, [x.float() for x in inputs])
    )
    for ours, of_exact, in_float32 in zip(found, exact, wide, strict=True):
        # A gradient past the largest float16 is infinite: a gradient scaler must see it.
        fits = ours is found[0] or in_float32.abs().max() < torch.finfo(dtype).max / 2
        assert ours.isfinite().all() or not (fits and of_exact.isfinite().all())


@pytest.mark.law(5)
@cases_of_torch
@pytest.mark.parametrize("where", ["q", "k", "v", "unwanted"])
def test_an_outlier_costs_no_more_digits_than_in_the_plain_formula(name, options, where):
    torch.manual_seed(0)  # for the weights of those that have some
    attend = build(name, options, d=16)
    for size in (1e2, 1e4, 1e8, 1e30):
        errors, formula = 0.0, 0.0
        for seed in range(4):
            inputs = draw(seed, 48, b=1, d=16, e=16, dtype=torch.float32)
            inputs = with_outlier(inputs, seed, where=where, whole=seed % 2 == 0, size=size)
            exact = attend(*(x.double() for x in inputs))
            errors += error_of_rows(attend(*inputs), exact) / 4
            formula += error_of_rows(plain(attend, *inputs), exact) / 4
        # The tolerance is that without an outlier; see above.
        assert errors <= 4 * formula + 8 * torch.finfo(torch.float32).eps


def error_of_rows(found, exact):
    """The mean error of a row relative to its norm, so that one huge row does not hide the others."""
    error = (found - exact).norm(dim=-1) / exact.norm(dim=-1).clamp(min=1e-30)
    return torch.where(error.isnan(), torch.inf, error).mean().item()


# Offsets that leave the result of a method the same in exact arithmetic: one that all keys share, which adds one number
# to all scores of a query; or one of queries and keys alike, which moves no distance. The others see any offset:
# features of single tokens (linear, performer), projections whose weights do not sum to one (linformer), directions
# (reformer), landmarks of both kinds (skyformer_softmax).
COMMON_OFFSET = {
    **dict.fromkeys(("softmax", "nystrom", "near_far", "informer", "longformer", "bigbird"), "k"),
    **dict.fromkeys(("kernelized", "skyformer"), "qk"),
}


@pytest.mark.law(5)
@pytest.mark.parametrize(
    ("name", "options"), [case for case in cases_of_torch.args[1] if case.values[0] in COMMON_OFFSET]
)
@pytest.mark.parametrize("size", [100, 1000, 4000])
def test_a_common_offset_costs_no_more_digits_than_in_the_plain_formula(name, options, size):
    attend, errors, formula = build(name, options, d=16), 0.0, 0.0
    dense = dense_causal if options.get("is_causal") else functools.partial(dense_softmax, bias=options.get("bias"))
    for seed in range(4):
        # On a grid, so that the sums with the offset are exact in float32.
        q, k, v = ((x * 2**10).round() / 2**10 for x in draw(seed, 48, b=1, d=16))
        offset = (size * F.normalize(draw(seed + 9, 1, b=1, d=16)[0], dim=-1) * 2**10).round() / 2**10
        inputs = [q + offset if "q" in COMMON_OFFSET[name] else q, k + offset, v]
        expected, low = attend(*inputs), [x.float() for x in inputs]
        if not (options.get("is_causal") and options["num_heavy"]):
            # There, scores of several mean queries are compared, to each of which the offset adds another number.
            torch.testing.assert_close(expected, attend(q, k, v), rtol=1e-5, atol=1e-5)
        errors += error_of_rows(attend(*low), expected) / 4
        # The formula of near_far is given what the method chose in float32; exact attention chooses nothing.
        close = (dense(*low), dense(*inputs)) if name == "near_far" else (plain(attend, *low), expected)
        formula += error_of_rows(*close) / 4
    assert errors <= 4 * formula + 8 * torch.finfo(torch.float32).eps


@pytest.mark.law(5)
@every_case
def test_equal_tokens_are_finite(name, options):
    inputs = [torch.ones(1, 2, 20, 4, dtype=torch.float64, requires_grad=True, device=DEVICE) for _ in range(3)]
    out = build(name, options)(*inputs)
    out.sum().backward()
    assert out.isfinite().all()
    assert all(x.grad.isfinite().all() for x in inputs)


@pytest.mark.law(5)
@every_case
def test_a_sequence_without_a_real_token_gives_zeros(name, options):
    inputs = [x.requires_grad_() for x in draw(6, 17)]
    keep = torch.ones(2, 17, dtype=torch.bool, device=DEVICE)
    keep[0] = False
    out = build(name, options)(*inputs, keep=keep)
    assert not out[0].any()
    assert out[1].isfinite().all()
    out.sum().backward()
    assert all(not x.grad[0].any() and x.grad.isfinite().all() for x in inputs)


@pytest.mark.law(5)
@every_case
def test_queries_without_a_real_key_give_zeros(name, options):
    if not is_cross(name, options):
        pytest.skip("self-attention only")
    q, k, v = draw(6, 17, 19)
    out = build(name, options)(q, k, v, key_keep=torch.tensor([[False] * 19, [True] * 19], device=DEVICE))
    assert not out[0].any()
    assert out[1].isfinite().all()


# Law 6: memory grows linearly, and nothing n x s (nor, where a fused call serves, n x m) is stored.


class LargestTensor(TorchDispatchMode):
    """Remembers the largest storage that any operation returned, in float64 numbers: kernels share one of bytes."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.untyped_storage().nbytes() // 8)
        return out


def largest_tensor(name, options, n, masked):
    inputs = [x.requires_grad_() for x in draw(7, n, b=1, h=1, d=2, e=2)]
    keep = draw_keep(7, 1, n) if masked else None
    attend = build(name, options, h=1, d=2)
    with LargestTensor() as largest:
        attend(*inputs, keep=keep).sum().backward()
    return largest.numel


@pytest.mark.law(8)
@cases_of_torch
@pytest.mark.parametrize("kind", ["meta", "fake"])
def test_tensors_without_numbers_give_shapes(name, options, kind):
    """The meta device, which autocast does not know, and FakeTensorMode plan shapes and memory."""
    attend, mode = build(name, options), FakeTensorMode(allow_non_fake_inputs=True)
    attend = attend.to("meta") if kind == "meta" else attend
    for masked in (False, True):
        tensors = (*draw(0, 30), draw_keep(0, 2, 30))
        *inputs, keep = (x.to("meta") if kind == "meta" else mode.from_tensor(x) for x in tensors)
        inputs = [x.requires_grad_() for x in inputs]
        with mode if kind == "fake" else contextlib.nullcontext():
            out = attend(*inputs, keep=keep if masked else None)
            out.sum().backward()
            with pytest.raises(ValueError, match=r"cu_seqlens is given .* without numbers"):
                attend(*(x[:1] for x in inputs), cu_seqlens=torch.tensor([0, 12, 30], device=out.device))
        assert out.shape == inputs[2].shape
        assert [x.grad.shape for x in inputs] == [x.shape for x in inputs]


@pytest.mark.law(6)
@every_case_masked
def test_nothing_quadratic_is_stored(name, options, masked):
    if (name, options) == QUADRATIC_BY_DESIGN:
        assert largest_tensor(name, options, 256, masked) >= 256 * 256
        pytest.skip("the papers' baseline stores n x s numbers by design")
    # Interpreted kernels take long for a long sequence; the m x m matrices between their passes share one workspace.
    count, lengths = (32, (512, 1024)) if "backend" in options else (64, (1024, 2048))
    # The features of the Linformer are weights, one row of max_length each, however many tokens there are.
    counts = ("num_landmarks",) if name == "linformer" else ("num_landmarks", "num_features", "num_clusters")
    many = {**options, **{option: count for option in counts if option in options}}
    if name == "near_far" and "backend" in options:
        # The choice of clusters, which is torch's, holds 2^14 distances or more; large blocks make few programs.
        many["block_size"] = 64
    if name == "near_far" and "bias" in options:
        # Sums of clusters by pieces of blocks are n num_clusters / block_size rows.
        many["block_size"] = 64
    small, large = (largest_tensor(name, many, n, masked) for n in lengths)
    # Kernelized widens 2 channels to 4; padding and a landmark slot add a constant. n x m would be 64 n (32 n).
    assert large <= 16 * lengths[1]
    assert large <= 2.1 * small


# Law 7: randomness enters as a generator.


@pytest.mark.law(7)
@pytest.mark.parametrize(("name", "options"), RANDOM, ids=str)
def test_the_generator_decides(name, options):
    q, k, v = draw(8, 40)
    attend = FUNCTIONS[name]
    state = torch.get_rng_state()
    first, again, other = (
        attend(q, k, v, **options, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    )
    torch.testing.assert_close(first, again, rtol=0, atol=0)
    assert not torch.allclose(first, other)
    torch.testing.assert_close(torch.get_rng_state(), state, rtol=0, atol=0)


@pytest.mark.law(7)
@pytest.mark.parametrize(("name", "options"), RANDOM, ids=str)
def test_draws_do_not_see_padding_or_neighbours(name, options):
    q, k, v = draw(9, 40)
    keep = draw_keep(9, 2, 40)
    if name in POSITIONAL:
        # Holes count as positions: padding at both ends alone.
        keep = (keep.cumsum(-1) > 2) & (keep.flip(-1).cumsum(-1).flip(-1) > 4)
    attend = FUNCTIONS[name]
    together = attend(q, k, v, keep=keep, **options, generator=torch.Generator().manual_seed(1))
    for i in range(2):
        real = keep[i]
        alone = [x[i : i + 1, :, real] for x in (q, k, v)]
        out = attend(*alone, **options, generator=torch.Generator().manual_seed(1))
        torch.testing.assert_close(together[i : i + 1, :, real], out, **CLOSE)


@pytest.mark.law(7)
@every_case
def test_evaluation_repeats_itself(name, options):
    q, k, v = draw(10, 40)
    attend = build(name, options)
    state = torch.get_rng_state()
    torch.testing.assert_close(attend(q, k, v), attend(q, k, v), rtol=0, atol=0)
    torch.testing.assert_close(torch.get_rng_state(), state, rtol=0, atol=0)


@pytest.mark.law(8)
@cases_of_torch
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_a_graph_the_result_is_the_same(name, options, context):
    attend, keep, leaves = build(name, options), draw_keep(10, 2, 40), [x.requires_grad_() for x in draw(10, 40)]
    for masks in ({}, {"keep": keep}):
        with context():
            out = attend(*leaves, **masks)
        assert not out.requires_grad
        # Without a gradient, a loop of our own sums segments in another order.
        torch.testing.assert_close(out, attend(*leaves, **masks).detach(), **CLOSE)


@pytest.mark.law(7)
@pytest.mark.parametrize(("name", "options"), RANDOM, ids=str)
def test_training_draws_anew(name, options):
    q, k, v = draw(11, 40)
    attend = build(name, {**options, **TRAINING.get(name, {})}).train()
    assert not torch.allclose(attend(q, k, v), attend(q, k, v))


# Devices and dtypes of what torch makes without being told them.
DEFAULTS = ["meta", torch.bfloat16, torch.float16, torch.float64]
every_default = pytest.mark.parametrize("default", DEFAULTS, ids=str)


@contextlib.contextmanager
def under(default):
    """A default of torch, or the one that is there."""
    before = torch.get_default_dtype()
    try:
        with torch.device(default) if isinstance(default, str) else contextlib.nullcontext():
            torch.set_default_dtype(default if isinstance(default, torch.dtype) else before)
            yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.law(7)
@pytest.mark.parametrize(
    ("name", "options", "n", "default", "native"),
    [
        *((*case.values, 40, default, "1") for case in cases_of_torch.args[1] for default in DEFAULTS),
        # Interpreted kernels take seconds.
        *((*case.values, 20, "meta", "1") for case in CASES if "backend" in case.values[1]),
        # Some loops of our own begin at 1,024 tokens; torch's operators then run in the calling thread.
        *((name, first, 1100, "meta", native) for name, (first, *_) in VARIANTS.items() for native in "10"),
    ],
    ids=str,
)
def test_torchs_defaults_change_nothing(name, options, n, default, native, monkeypatch):
    if native == "0":
        monkeypatch.setenv("NYSTROM_NATIVE", "0")
    of_method, called = called_with(options)
    taps = {} if "is_causal" in called else {"conv_kernel_size": 3}
    layer = MultiheadAttention(8, 2, method=name, dtype=torch.float32, **of_method, **taps).to(DEVICE).eval()
    attend, keep, inputs = build(name, options), draw_keep(8, 2, n), draw(8, n, dtype=torch.float32)
    # One sequence is short, and both are in a call of their own.
    keep[1, 9:], keep[:, 8] = False, False
    tokens = draw(8, n, h=1, d=8, dtype=torch.float32)[0][:, 0]
    calls = [
        (lambda *x: attend(*x), inputs),
        (lambda *x: attend(*x, keep=keep), inputs),
        (lambda *x: attend(*x, keep=keep[:, :9]), [x[:, :, :9] for x in inputs]),
        (lambda x: layer(x, x, x, key_padding_mask=~keep, **called)[0], [tokens]),
    ]
    if is_cross(name, options):
        calls.append((lambda q, k, v: attend(q[:, :, :9], k, v, key_keep=keep), inputs))
    for call, its_inputs in calls[1:2] if "backend" in options else calls:
        results = []
        for each in (None, default):
            leaves = [x.clone().requires_grad_() for x in its_inputs]
            with under(each):
                out = call(*leaves)
                out.square().sum().backward()
            results.append([out.detach(), *(x.grad for x in leaves)])
        for x, y in zip(*results, strict=True):
            torch.testing.assert_close(y, x, rtol=0, atol=0)


@pytest.mark.law(7)
@every_default
@pytest.mark.parametrize("rows", [nystrom_rows, near_far_rows])
def test_rows_do_not_see_torchs_defaults(rows, default):
    (q, k, _), asked, keep = draw(8, 1100, dtype=torch.float32), torch.tensor([0, 7, 1099]), draw_keep(8, 2, 1100)
    expected = rows(q, k, asked.to(DEVICE), keep=keep)
    with under(default):
        torch.testing.assert_close(rows(q, k, asked.to(DEVICE), keep=keep), expected, rtol=0, atol=0)


@pytest.mark.law(7)
@every_default
@pytest.mark.parametrize(("name", "options"), [case for case in RANDOM if "backend" not in case[1]], ids=str)
def test_draws_do_not_see_torchs_defaults(name, options, default):
    (q, k, v), attend, results = draw(8, 400), FUNCTIONS[name], []
    for each in (None, default):
        torch.manual_seed(1)
        generators = (torch.Generator().manual_seed(1), *(() if name == "performer" else ("global",)))
        with under(each):
            results.append([attend(q, k, v, **options, generator=generator) for generator in generators])
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(y, x, rtol=0, atol=0)


@pytest.mark.law(7)
@pytest.mark.long
@every_default
@pytest.mark.parametrize("name", ["bigbird", "skyformer", "reformer"])
def test_an_exported_draw_does_not_see_torchs_defaults(name, default):
    q, k, v = draw(8, 400)
    attend = build(name, VARIANTS[name][0])
    expected = attend(q, k, v)
    with under(default):
        exported = torch.export.export(attend, (q, k, v)).module()
        torch.testing.assert_close(exported(q, k, v), expected, **CLOSE)


# Law 8: compile, export with a dynamic n, gradcheck.


@pytest.mark.law(8)
@compiled_cases_masked
def test_compiles_to_one_graph(name, options, masked):
    attend = build(name, options)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    inputs, keep = [x.requires_grad_() for x in draw(12, 40)], draw_keep(12, 2, 40) if masked else None
    out = compiled(*inputs, keep=keep)
    torch.testing.assert_close(out, attend(*inputs, keep=keep), **CLOSE)
    out.sum().backward()
    torch.compiler.reset()


# For methods with positions, torch reasons about a symbolic length for half a minute or more.
LONG = {"reformer", "longformer", "bigbird"}


@pytest.mark.law(8)
@pytest.mark.parametrize(
    ("name", "backend"),
    [pytest.param(*case, marks=[pytest.mark.slow] * (case[0] in LONG)) for case in EXACT_CASES],
    ids=str,
)
@pytest.mark.long
def test_compiles_to_one_graph_for_any_length(name, backend):
    attend = build(name, {**VARIANTS[name][0], **backend})
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    # The second length compiles the last time, with a symbolic one. With dynamic=True batch and heads are symbols too,
    # for which torch 2.13 plans a backward pass of its own fused call that fails.
    for n in (40, 47):
        inputs, keep = [x.requires_grad_() for x in draw(12, n)], draw_keep(12, 2, n)
        out = compiled(*inputs, keep=keep)
        torch.testing.assert_close(out, attend(*inputs, keep=keep), **CLOSE)
        out.sum().backward()
    torch.compiler.reset()


@pytest.mark.law(8)
@pytest.mark.parametrize(
    ("kind", "masked", "marked"),
    [
        ("function", False, False),
        ("function", True, True),
        ("layer", True, False),
    ],
)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name != "nystrom")) for name in VARIANTS]
)
def test_one_graph_serves_all_lengths(name, kind, masked, marked):
    """Also those that blocks, segments or the skip's windows divide; a length of the exact limit may have its own."""
    attend, counter = build(name, VARIANTS[name][0]), CompileCounter()
    if kind == "layer":
        layer = MultiheadAttention(8, 2, method=name, conv_kernel_size=3, **VARIANTS[name][0]).double().to(DEVICE)
        attend = lambda x, keep: layer.eval()(x, key_padding_mask=None if keep is None else ~keep)[0]  # noqa: E731
    compiled = torch.compile(attend, fullgraph=True, dynamic=None if marked else True, backend=counter)
    counts = []
    for n in (97, 100, 64, 121, 80, 33, 48, 128, 65, 5):
        inputs, keep = draw(12, n), draw_keep(12, 2, n) if masked else None
        inputs = [draw(12, n, h=1, d=8)[0][:, 0]] if kind == "layer" else inputs
        for x in inputs if marked else ():
            torch._dynamo.mark_dynamic(x, x.ndim - 2)
        if marked and keep is not None:
            torch._dynamo.mark_dynamic(keep, 1)
        torch.testing.assert_close(compiled(*inputs, keep=keep), attend(*inputs, keep=keep), **CLOSE)
        counts.append(counter.frame_count)
    assert counts[-2:] in ([1, 1], [1, 2])
    torch.compiler.reset()


@pytest.mark.law(8)
@pytest.mark.long
@every_exact_case
def test_compiles_for_one_length_where_nothing_is_trained(name, backend):
    attend = build(name, {**VARIANTS[name][0], **backend})
    inputs, keep = draw(12, 40), draw_keep(12, 2, 40)
    out = torch.compile(attend, fullgraph=True, dynamic=False, backend="aot_eager")(*inputs, keep=keep)
    torch.testing.assert_close(out, attend(*inputs, keep=keep), **CLOSE)
    torch.compiler.reset()


@pytest.mark.law(8)
@pytest.mark.slow
@every_exact_case
def test_inductor_gives_the_same(name, backend):
    attend = build(name, {**VARIANTS[name][0], **backend})
    q, k, v = draw(12, 40, dtype=torch.float32)
    keep = draw_keep(12, 2, 40)
    out = torch.compile(attend, fullgraph=True)(q, k, v, keep=keep)
    torch.testing.assert_close(out, attend(q, k, v, keep=keep), rtol=1e-3, atol=1e-4)
    torch.compiler.reset()


@pytest.mark.law(8)
@compiled_cases_masked
@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.long)], ids=["traced", "strict"])
def test_exports_with_a_dynamic_length(name, options, masked, strict):
    attend = build(name, options)
    # A named length may be any number up to the most: an export that holds for some of them alone raises. One without
    # a name must find by itself that q, k and v are of one length.
    length = torch.export.Dim("n", max=options.get("max_length")) if masked else torch.export.Dim.DYNAMIC
    shapes = {x: {2: length} for x in ("q", "k", "v")}
    kwargs = {}
    if masked:
        kwargs, shapes["keep"] = {"keep": draw_keep(13, 2, 40)}, {1: length}
    if options.get("is_causal"):
        with pytest.raises(Exception, match="is_causal is True for a symbolic length"):
            torch.export.export(attend, tuple(draw(13, 40)), kwargs, dynamic_shapes=shapes, strict=strict)
        return
    exported = torch.export.export(attend, tuple(draw(13, 40)), kwargs, dynamic_shapes=shapes, strict=strict).module()
    for n in (40, 47, 3):
        inputs = draw(13, n)
        keeps = {"keep": draw_keep(13, 2, n)} if masked else {}
        torch.testing.assert_close(exported(*inputs, **keeps), attend(*inputs, **keeps), **CLOSE)


@pytest.mark.law(8)
@every_case_masked
def test_gradients_are_right(name, options, masked):
    if options.get("landmarks") == "kmeans":
        # The assignment jumps, and finite differences with it; away from jumps the means are smooth.
        inputs = [x.requires_grad_() for x in draw(14, 9, b=1, h=1, d=2, e=2, size=3.0)]
    else:
        inputs = [x.requires_grad_() for x in draw(14, 9, b=1, h=1, d=2, e=2)]
    keep = draw_keep(14, 1, 9).logical_or(torch.arange(9, device=DEVICE) < 8) if masked else None
    attend = build(name, options, h=1, d=2)
    # One random direction for kernels, which are interpreted here, and all of them for the others.
    fast = "backend" in options
    assert torch.autograd.gradcheck(lambda q, k, v: attend(q, k, v, keep=keep), inputs, fast_mode=fast)


# torch's fused call is mapped one by one.
mapped_one_by_one = pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")


def second_derivatives(loss, x, way):
    """The product of the Hessian and `way`, by every way."""

    def by_grad():
        (first,) = torch.autograd.grad(loss(x), x, create_graph=True)
        return torch.autograd.grad(first, x, way)[0]

    def by_backward():
        leaf = x.detach().clone().requires_grad_()
        (first,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
        first.backward(way)
        return leaf.grad

    def by_reverse_twice():
        return torch.func.vjp(torch.func.grad(loss), x.detach())[1](way)[0]

    def by_forward_over_reverse():
        return torch.func.jvp(torch.func.grad(loss), (x.detach(),), (way,))[1]

    yield from (by_grad, by_backward, by_reverse_twice, by_forward_over_reverse)


@pytest.mark.law(8)
@mapped_one_by_one
@cases_with_one_of_triton
@pytest.mark.parametrize("masked", [False, True])
def test_second_derivatives_are_right_or_raise(name, options, masked):
    if masked and "backend" in options:
        pytest.skip("the operator is the same one")
    size = 3.0 if options.get("landmarks") == "kmeans" else 1.0
    q, k, v = draw(14, 9, b=1, h=1, d=2, e=2, size=size)
    keep = draw_keep(14, 1, 9).logical_or(torch.arange(9, device=DEVICE) < 8) if masked else None
    attend, way = build(name, options, h=1, d=2), draw(15, 9, b=1, h=1, d=2, e=2)[0]
    found = 0
    for wanted, x in enumerate((q, k, v)):

        def loss(x, wanted=wanted):
            inputs = [x if i == wanted else y for i, y in enumerate((q, k, v))]
            return attend(*inputs, keep=keep).pow(3).sum()

        def first(x, loss=loss):
            x = x.detach().requires_grad_()
            return torch.autograd.grad(loss(x), x)[0]

        step = 1e-5
        expected = (first(x + step * way) - first(x - step * way)) / (2 * step)
        for ask in second_derivatives(loss, x.clone().requires_grad_(), way):
            try:
                result = ask()
            except RuntimeError as error:
                assert str(error)  # noqa: PT017
                continue
            found += 1
            # The step's own error is its square times the fourth derivative; rounding is eps over the step.
            torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)
    # The others, whose fused call has none, raise.
    if METHODS[name].second_derivatives in ("always", *(f"{key}={value!r}" for key, value in options.items())):
        # Three doors for each of q, k and v; forward over reverse needs what a fused backward does not have.
        assert found >= 9


@pytest.mark.law(8)
@mapped_one_by_one
@cases_of_torch
def test_forward_mode_is_right_or_refused_by_name(name, options):
    inputs, ways = draw(14, 9, b=1, h=1, d=2, e=2), draw(15, 9, b=1, h=1, d=2, e=2)
    attend = build(name, options, h=1, d=2)

    def loss(*inputs):
        return attend(*inputs).pow(3).sum()

    if METHODS[name].second_derivatives not in ("always", *(f"{key}={value!r}" for key, value in options.items())):
        for forward in (
            lambda: torch.func.jvp(loss, tuple(inputs), tuple(ways)),
            lambda: torch.func.jacfwd(loss)(*inputs),
            lambda: torch.func.hessian(loss)(*inputs),
        ):
            with pytest.raises(NotImplementedError, match=r"no derivative in forward mode.*use reverse mode"):
                forward()
        return
    gradients = torch.func.grad(loss, argnums=(0, 1, 2))(*inputs)
    expected = sum((x * way).sum() for x, way in zip(gradients, ways, strict=True))
    torch.testing.assert_close(torch.func.jvp(loss, tuple(inputs), tuple(ways))[1], expected, **CLOSE)
    reverse = torch.func.jacrev(torch.func.jacrev(loss))(*inputs)
    torch.testing.assert_close(torch.func.hessian(loss)(*inputs), reverse, **CLOSE)


@pytest.mark.law(8)
@mapped_one_by_one
@cases_of_torch
@pytest.mark.parametrize("masked", [False, True])
def test_gradients_of_each_sequence_by_torch_func(name, options, masked):
    inputs = draw(17, 23, b=3)
    keep = draw_keep(17, 3, 23) if masked else None
    attend = build(name, options)

    def loss(q, k, v, keep=None):
        return attend(q[None], k[None], v[None], keep=None if keep is None else keep[None]).square().sum()

    arguments = inputs if keep is None else [*inputs, keep]
    found = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(*arguments)
    leaves = [x.clone().requires_grad_() for x in inputs]
    attend(*leaves, keep=keep).square().sum().backward()
    for x, y in zip(found, leaves, strict=True):
        torch.testing.assert_close(x, y.grad, **CLOSE)


@pytest.mark.law(8)
@mapped_one_by_one
@cases_of_torch
def test_a_map_over_one_of_the_inputs_alone(name, options):
    q, k, v = draw(18, 23)
    attend = build(name, options)
    for i in range(3):
        several = [torch.stack([x, 2 * x]) if i == j else x for j, x in enumerate((q, k, v))]
        out = torch.func.vmap(attend, in_dims=tuple(0 if i == j else None for j in range(3)))(*several)
        for copy in range(2):
            expected = attend(*(x[copy] if i == j else x for j, x in enumerate(several)))
            torch.testing.assert_close(out[copy], expected, **CLOSE)


@pytest.mark.law(8)
@mapped_one_by_one
@cases_of_torch
@pytest.mark.parametrize("case", ["open", "masked", "skip"])
def test_a_mapped_backward_pass_gives_the_rows_of_the_jacobian(name, options, case):
    inputs, attend = draw(14, 9, b=1, h=1, d=2, e=2), build(name, options, h=1, d=2)
    more = {"keep": draw_keep(14, 1, 9)} if case == "masked" else {}
    if case == "skip":
        if options.get("is_causal"):
            pytest.skip("the skip sees later tokens")
        more["skip"] = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64, device=DEVICE).view(1, 1, 3, 1)
    for i, x in enumerate(inputs):

        def function(x, i=i):
            return attend(*(x if i == j else y for j, y in enumerate(inputs)), **more)

        leaf = x.clone().requires_grad_()
        out = function(leaf)
        grads = torch.eye(out.numel(), dtype=out.dtype, device=DEVICE).view(-1, *out.shape)
        rows = torch.stack([torch.autograd.grad(out, leaf, grad, retain_graph=True)[0] for grad in grads])
        torch.testing.assert_close(torch.func.jacrev(function)(x).view(rows.shape), rows, **CLOSE)
        # The graph was recorded outside of the map
        found = torch.vmap(lambda grad, out=out, leaf=leaf: torch.autograd.grad(out, leaf, grad, retain_graph=True))(
            grads
        )
        torch.testing.assert_close(found[0], rows, **CLOSE)

        def pull(x, grad, function=function):
            return torch.func.vjp(function, x)[1](grad)[0]

        torch.testing.assert_close(torch.vmap(pull, (None, 0))(x, grads), rows, **CLOSE)
        several = torch.stack([x, -2 * x])
        for grad, dim in ((grads[:2], 0), (torch.ones_like(out), None)):
            alone = [pull(y, grad if dim is None else grad[j]) for j, y in enumerate(several)]
            torch.testing.assert_close(torch.vmap(pull, (0, dim))(several, grad), torch.stack(alone), **CLOSE)
        try:
            (found,) = torch.autograd.grad(out, leaf, grads, is_grads_batched=True)
        except RuntimeError as error:
            assert "is_grads_batched is True, which this backward pass does not support" in str(error)  # noqa: PT017
        else:
            torch.testing.assert_close(found, rows, **CLOSE)


# Law 9: what cannot be honoured raises by name.


def bad_inputs():
    q, k, v = draw(15, 9)
    ones = torch.ones(2, 9, dtype=torch.bool, device=DEVICE)
    yield "rank of q", (q[0], k, v), {}, "q has shape.*split the heads"
    yield "rank of v", (q, k, v[0]), {}, "v has shape"
    yield "heads", (q, k[:, :1], v), {}, r"k has \(batch, heads\)"
    yield "widths", (q, k[..., :3], v), {}, "k has head width 3 but q has 4"
    yield "tokens of v", (q, k, v[:, :, :5]), {}, "v holds 5 tokens but k holds 9"
    yield "integers", (q.long(), k, v), {}, "q has dtype torch.int64"
    yield "dtypes", (q, k.float(), v), {}, "k has dtype torch.float32 but q has torch.float64"
    yield "no width", (q[..., :0], k[..., :0], v), {}, "q has shape.*width axis is empty"
    yield "a list", (q.tolist(), k, v), {}, "q is a list; expected a tensor"
    yield "nothing", (q, None, v), {}, "k is a NoneType; expected a tensor"
    jagged = torch.nested.as_nested_tensor(list(q), layout=torch.jagged)
    yield "nested", (jagged, k, v), {}, "q is a nested tensor.*to_padded_tensor"
    yield "sparse", (q.to_sparse(), k, v), {}, r"q has the layout torch.sparse_coo.*to_dense"
    yield "float8", (q.to(torch.float8_e4m3fn), k, v), {}, "q has dtype torch.float8_e4m3fn; expected float32"
    yield "length of keep", (q, k, v), {"keep": ones[:, :8]}, r"keep has shape \(2, 8\) but q holds 2 x 9 tokens"
    yield "batch of keep", (q, k, v), {"keep": ones[:1]}, r"keep has shape \(1, 9\)"
    yield "dtype of keep", (q, k, v), {"keep": ones.float()}, "keep has dtype torch.float32; expected torch.bool"
    yield "mask of four axes", (q, k, v), {"keep": ones[:, None, None]}, r"pass keep.reshape\(2, 9\)"
    yield "mask of one axis", (q, k, v), {"keep": ones[0]}, r"pass keep.reshape\(1, 9\).expand\(2, 9\)"
    swapped = [x.transpose(1, 2) for x in (q, k, v)]
    # A Module knows how many heads it has.
    yield "heads behind tokens", swapped, {"keep": ones}, r"or q.transpose\(1, 2\) if its axes are|9 heads of width 4"
    yield "n x n mask", (q, k, v), {"keep": ones[:, None].expand(2, 9, 9)}, "n x s mask cannot be"
    yield (
        "causal mask",
        (q, k, v),
        {"keep": torch.ones(9, 9, dtype=torch.bool, device=DEVICE).tril()[None, None]},
        "causal",
    )
    for other in ("key_keep", "query_keep"):
        refused = rf"{other} has shape \(2, 3\)|{other} cannot be honoured: \w+ is self-attention, .*Pass keep"
        yield other, (q, k, v), {other: ones[:, :3]}, refused
        both = rf"keep is given, and so is {other}: pass keep alone|{other} cannot be honoured: \w+ is self-attention"
        yield f"keep and {other}", (q, k, v), {"keep": ones, other: ones}, both
    for n in (8, 10):
        fewer = (draw(0, n)[0], k, v), {"keep": torch.ones(2, n, dtype=torch.bool, device=DEVICE)}
        yield f"keep of {n}", *fewer, f"keep is given for {n} queries and 9 keys.*pass key_keep"


BAD_INPUTS = list(bad_inputs())


@pytest.mark.law(9)
@every_case
@pytest.mark.refuses
@pytest.mark.parametrize("case", BAD_INPUTS, ids=[case[0] for case in BAD_INPUTS])
def test_bad_inputs_raise_by_name(name, options, case):
    _, inputs, masks, message = case
    attend = build(name, options)
    with pytest.raises(ValueError, match=message):
        attend(*inputs, **masks)


@pytest.mark.law(9)
@pytest.mark.parametrize("name", METHODS)
def test_unknown_options_raise_with_the_nearest(name):
    known = [field.name for field in dataclasses.fields(METHODS[name].options)]
    with pytest.raises(ValueError, match=f"Perhaps you meant '{known[0]}'"):
        build_attention(name, num_heads=2, head_dim=4, **{known[0] + "s": 3})


@pytest.mark.law(9)
def test_unknown_methods_raise():
    with pytest.raises(ValueError, match=r"attention method 'nystorm' is unknown.*Perhaps you meant 'nystrom'"):
        build_attention("nystorm", num_heads=2, head_dim=4)


@pytest.mark.law(1)
@pytest.mark.parametrize("rows", [nystrom_rows, near_far_rows])
@pytest.mark.parametrize(("b", "n", "s"), [(2, 5, 0), (0, 5, 5), (2, 0, 5), (2, 0, 0)])
def test_rows_of_nothing_are_empty(rows, b, n, s):
    q, k, _ = draw(0, n, s, b=b)
    asked = torch.arange(n, device=DEVICE)
    for masks in ({"keep": ones(b, n)} if n == s else across("near_far", n, s, b), {"key_keep": ones(b, s)}):
        assert rows(q, k, asked, **masks).shape == (b, 2, n, s)


@pytest.mark.law(9)
@pytest.mark.refuses
@pytest.mark.parametrize("generator", [3, "globl"])
@pytest.mark.parametrize(("name", "options"), RANDOM, ids=str)
def test_what_is_no_generator_raises(name, options, generator):
    with pytest.raises(ValueError, match=f"generator is {generator!r}; expected None, 'global' or a torch.Generator"):
        FUNCTIONS[name](*draw(0, 40), generator=generator, **options)


@pytest.mark.law(9)
@pytest.mark.refuses
def test_autocast_takes_no_mix_with_float64():
    q, k, v = draw(0, 12)
    with torch.autocast(DEVICE, torch.bfloat16), pytest.raises(ValueError, match=r"k has dtype torch\.float64 but q"):
        build("nystrom", {"num_landmarks": 4})(q.float(), k, v.float())
