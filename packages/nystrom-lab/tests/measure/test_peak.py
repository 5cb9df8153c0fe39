"""The peak memory of a call: what counts, and what the library takes."""

import subprocess
import sys

import pytest
import torch

from nystrom import nystrom_attention
from nystrom.attention.heads import Masks
from nystrom.attention.methods.softmax import softmax_attention
from nystrom.attention.parts.stretches import in_threads
from nystrom.inspection.candidates import read_candidates
from nystrom.inspection.layer_sample import sample_layer
from nystrom.integrations.layer_calls import LayerCall
from nystrom_lab.measure.peak import peak_bytes

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("call", "peak"),
    [
        # The output; temporaries while they live; two at a time together.
        (lambda: torch.empty(1000, 1000), 4_000_000),
        (lambda: ([torch.empty(500, 1000).shape for _ in range(3)], torch.empty(100, 1000)), 2_000_000),
        (lambda: [x.shape for x in (torch.empty(1000, 1000), torch.empty(1000, 1000))], 8_000_000),
    ],
)
def test_what_lives_at_a_time_counts(call, peak):
    assert peak_bytes(call, CPU) == peak


def test_what_was_there_before_does_not_count():
    x = torch.zeros(1000, 1000)
    assert peak_bytes(lambda: x.add_(1), CPU) < 100


def test_gradients_and_what_is_saved_for_them_count():
    x = torch.randn(1000, 1000, requires_grad=True)

    def call():
        # sin and exp: one result, the other's result, saved, and at the end one gradient of each.
        x.sin().exp().sum().backward()

    assert peak_bytes(call, CPU) >= 12_000_000


def test_materialised_softmax_holds_two_square_matrices_and_the_fused_one_none():
    n, h = 512, 2
    q = torch.randn(1, h, n, 16)
    squares = 2 * h * n * n * 4
    assert squares <= peak_bytes(lambda: softmax_attention(q, q, q, form="materialised"), CPU) < 1.2 * squares
    assert peak_bytes(lambda: softmax_attention(q, q, q), CPU) < squares / 10


@pytest.mark.long
def test_measuring_memory_writes_nothing_to_the_terminal():
    # The call has a process of its own: the profiler reads its level only when it is first used in a process.
    code = "from nystrom_lab.measure.peak import *; peak_bytes(lambda: torch.empty(10), torch.device('cpu'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("layout", ["heads", "tokens"])
@pytest.mark.parametrize("skip", [False, True])
def test_training_needs_at_most_a_tenth_more_memory_than_fused_softmax(layout, skip):
    shape = (1, 8, 8192, 64) if layout == "heads" else (1, 8192, 8, 64)
    q, k, v, grad = (torch.randn(shape) if layout == "heads" else torch.randn(shape).transpose(1, 2) for _ in "qkvg")
    inputs = [x.requires_grad_() for x in (q, k, v)]
    weight = torch.randn(8, 1, 33, 1, requires_grad=True) if skip else None

    def step():
        out = nystrom_attention(*inputs, num_landmarks=64, skip=weight)
        out.backward(grad)
        return out

    # Fused softmax needs the output and three gradients, and copies a gradient that is laid out by head.
    needed = 5 if layout == "heads" else 4
    assert peak_bytes(step, torch.device("cpu")) <= 1.1 * needed * grad.nbytes


def test_memory_is_linear_at_sixteen_thousand_tokens():
    generator, taken = torch.Generator().manual_seed(0), {}
    for n in (8192, 16384):
        q, k, v = (torch.randn(1, 2, n, 8, generator=generator) for _ in range(3))
        call, candidates = LayerCall(0, "layer", q, k, v, Masks(), None), read_candidates(["nystrom-16"])
        taken[n] = peak_bytes(lambda c=call, m=candidates: sample_layer(c, m, 16, generator), torch.device("cpu"))
    assert taken[16384] < 2.2 * taken[8192]
    # A hundredth of the n x n numbers.
    assert taken[16384] < 0.01 * 4 * 16384**2


@pytest.mark.gpu
def test_on_a_gpu_the_output_and_temporaries_count():
    device = torch.device("cuda", 0)
    assert peak_bytes(lambda: torch.empty(1024, 1024, device=device), device) == 4 * 2**20
    assert peak_bytes(lambda: (torch.empty(1024, 1024, device=device), None)[1], device) == 4 * 2**20


def test_what_threads_allocate_counts():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    assert peak_bytes(lambda: in_threads(torch.ones, [1000, 2000]), torch.device("cpu")) >= 4 * 3000
    assert torch.get_num_threads() == 2
    torch.set_num_threads(threads)
