import subprocess
import sys
import time

import pytest
import torch

from nystrom.attention.methods.softmax import softmax_attention
from nystrom.clock import peak_bytes, seconds

CPU = torch.device("cpu")


def test_the_output_counts():
    assert peak_bytes(lambda: torch.empty(1000, 1000), CPU) == 4_000_000


def test_a_temporary_counts_while_it_lives():
    def call():
        for _ in range(3):
            torch.empty(500, 1000)
        return torch.empty(100, 1000)

    assert peak_bytes(call, CPU) == 2_000_000


def test_two_at_a_time_count_together():
    def call():
        first, second = torch.empty(1000, 1000), torch.empty(1000, 1000)
        del first, second

    assert peak_bytes(call, CPU) == 8_000_000


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


def test_measuring_memory_writes_nothing_to_the_terminal():
    # Its own process: the profiler reads its level only when it is first used in a process.
    code = (
        "import torch; from nystrom.clock import peak_bytes; peak_bytes(lambda: torch.empty(10), torch.device('cpu'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_time_holds_the_call():
    assert seconds(lambda: time.sleep(0.02), CPU) >= 0.02


@pytest.mark.gpu
def test_on_a_gpu_time_is_that_of_the_device_without_its_caches():
    device = torch.device("cuda", 0)
    x = torch.zeros(2**20, dtype=torch.uint8, device=device)
    torch.cuda._sleep(10**6)
    waited = seconds(lambda: torch.cuda._sleep(10**8), device)
    # At any clock that GPUs have, of 0.5 to 5 GHz.
    assert 0.02 <= waited <= 0.2
    assert 0 < seconds(lambda: x.add_(1), device) < 0.01


@pytest.mark.gpu
def test_on_a_gpu_the_output_and_temporaries_count():
    device = torch.device("cuda", 0)
    assert peak_bytes(lambda: torch.empty(1024, 1024, device=device), device) == 4 * 2**20
    assert peak_bytes(lambda: (torch.empty(1024, 1024, device=device), None)[1], device) == 4 * 2**20
