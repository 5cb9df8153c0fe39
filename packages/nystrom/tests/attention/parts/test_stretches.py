import gc
import os
import threading
import warnings
import weakref

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from nystrom.attention.functions import FUNCTIONS
from nystrom.attention.methods.near_far import near_far_attention
from nystrom.attention.methods.nystrom import nystrom_attention
from nystrom.attention.parts.by_heads import by_heads
from nystrom.attention.parts.stretches import cut, in_threads, num_parts
from nystrom.attention.skip import depthwise_skip

SKIP = torch.randn(4, 1, 5, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.fixture(autouse=True)
def threads_and_operators_of_torch(monkeypatch):
    monkeypatch.setenv("NYSTROM_NATIVE", "0")
    monkeypatch.setattr("nystrom.attention.parts.stretches._WORTH", 0)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_parts_are_computed_alone_and_the_number_of_threads_stays():
    def alone(part):
        # Long enough for another thread to take a part.
        torch.randn(300, 300).matmul(torch.randn(300, 300))
        return part, torch.get_num_threads(), torch.is_grad_enabled(), threading.get_ident()

    results = in_threads(alone, range(9))
    assert [each[:3] for each in results] == [(part, 1, False) for part in range(9)]
    assert threading.get_ident() not in {each[3] for each in results}
    of_new = []
    new = threading.Thread(target=lambda: of_new.append(torch.get_num_threads()))
    new.start()
    new.join()
    assert (torch.get_num_threads(), of_new) == (3, [3])


def test_an_error_is_raised_and_the_threads_go_on():
    def fail(part):
        raise ValueError(f"part {part}")

    with pytest.raises(ValueError, match="part"):
        in_threads(fail, range(5))
    assert in_threads(lambda part: -part, range(3)) == [0, -1, -2]


def test_slices_cover_a_range():
    for total, parts in ((0, 3), (1, 3), (7, 3), (8, 1)):
        assert [i for some in cut(total, parts) for i in range(total)[some]] == list(range(total))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_starts_threads_of_its_own():
    in_threads(abs, range(3))
    with warnings.catch_warnings():
        # Newer versions of Python warn of any fork of a process with threads.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        os._exit(in_threads(abs, [-1, -2, -3]) != [1, 2, 3])
    assert os.waitpid(child, 0)[1] == 0


CALLS = {
    "near_far": lambda q, k, v, w: near_far_attention(q, k, v, exact_up_to=0),
    "nystrom with the skip": lambda q, k, v, w: nystrom_attention(q, k, v, num_landmarks=16, skip=w),
    "skip": lambda q, k, v, w: depthwise_skip(v, w, to=q) + 0 * k,
}
# Methods of others, a few heads at a time, see `by_heads`.
OF_OTHERS = {
    "linear": {},
    "skyformer": {"num_landmarks": 16},
    "skyformer_softmax": {"num_landmarks": 16},
    "informer": {"num_queries": 16},
    "performer": {"num_features": 16},
    "reformer": {},
    "longformer": {"window": 33},
    "bigbird": {"block_size": 16},
}
CALLS |= {
    name: lambda q, k, v, w, name=name, options=options: FUNCTIONS[name](q, k, v, **options)
    for name, options in OF_OTHERS.items()
}


def draw(dtype, layout):
    g = torch.Generator().manual_seed(0)
    x = [torch.randn(1, 4, 2300, 16, generator=g, dtype=dtype) for _ in range(4)]
    x = [each.transpose(1, 2).contiguous().transpose(1, 2) if layout == "tokens" else each for each in x]
    return [each.requires_grad_() for each in (*x[:3], SKIP.to(dtype).clone())], x[3]


def results_of(call, inputs, grad):
    out = call(*inputs)
    return out, *(x for x in torch.autograd.grad(out, inputs, grad, allow_unused=True) if x is not None)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("layout", ["heads", "tokens"])
@pytest.mark.parametrize("name", CALLS)
def test_the_number_of_threads_changes_rounding_only_and_a_run_nothing(name, layout, dtype):
    inputs, grad = draw(dtype, layout)
    assert num_parts(*inputs[:3]) == 3
    many, again = (results_of(CALLS[name], inputs, grad) for _ in range(2))
    torch.set_num_threads(1)
    # Sums over 2,300 tokens in another order.
    close = {"rtol": 1e-10, "atol": 1e-11} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-4}
    for x, y, z in zip(many, again, results_of(CALLS[name], inputs, grad), strict=True):
        assert torch.equal(x, y)
        torch.testing.assert_close(x, z, **close)


@pytest.mark.parametrize(("name", "most"), [("near_far", 0.05), ("skip", 0.2), *((name, 0.4) for name in OF_OTHERS)])
def test_the_calling_thread_runs_few_operators(name, most):
    """Each may wait for another thread."""
    inputs, grad = draw(torch.float32, "heads")
    kinds = ("aten::bmm", "aten::baddbmm", "aten::copy_", "aten::scatter_add_", "aten::_softmax")
    counts = []
    for threads in (3, 1):
        torch.set_num_threads(threads)
        # The profiler records nothing of other threads.
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            results_of(CALLS[name], inputs, grad)
        counts.append(sum(event.count for event in profiled.key_averages() if event.key in kinds))
    assert counts[0] < most * counts[1]


# Some heads of each thread, and a head's own numbers: random rotations and blocks.
def test_heads_keep_their_own_numbers_gradients_and_derivatives():
    inputs, grad = draw(torch.float64, "heads")
    inputs[2].requires_grad_(False)
    q, k, v = inputs[:3]

    def attend(heads, q, k, v):
        return torch.arange(1.0, 5.0)[heads, None, None] * q * v

    out = by_heads(attend, q, k, v)
    assert type(out.grad_fn).__name__ == "_ByHeadsBackward"
    torch.testing.assert_close(out, attend(slice(None), q, k, v), rtol=0, atol=0)
    of_q, of_k = torch.autograd.grad(out, (q, k), grad, retain_graph=True)
    assert torch.equal(of_k, torch.zeros_like(k))
    (again,) = torch.autograd.grad(out, q, grad.requires_grad_(), create_graph=True)
    assert torch.equal(of_q, again)
    assert torch.equal(torch.autograd.grad(again.sum(), grad)[0], attend(slice(None), torch.ones_like(q), k, v))


@pytest.mark.parametrize("keeps", [False, True])
def test_what_a_gradient_needed_is_gone_after_it_unless_it_is_kept(keeps):
    inputs, grad = draw(torch.float64, "heads")
    saved = []

    def attend(heads, q, k, v):
        weights = q.exp()
        saved.append(weakref.ref(weights))
        return weights * v

    out = by_heads(attend, *inputs[:3])
    out.backward(grad, retain_graph=keeps)
    gc.collect()
    assert {each() is None for each in saved} == {not keeps}
    first = inputs[0].grad.clone()
    if keeps:
        out.backward(grad)
        torch.testing.assert_close(inputs[0].grad, 2 * first, rtol=0, atol=0)


def test_hooks_of_the_caller_see_what_is_kept():
    inputs, _ = draw(torch.float64, "heads")
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: seen.append(x.shape) or x, lambda x: x):
        by_heads(lambda heads, q, k, v: q * v, *inputs[:3])
    assert seen == [inputs[0].shape] * 2


def test_an_error_of_a_backward_pass_is_that_of_the_caller():
    inputs, grad = draw(torch.float64, "heads")
    out = by_heads(lambda heads, q, k, v: q * v, *inputs[:3])
    with torch.no_grad():
        inputs[0].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(grad)
