import pytest
import torch

from nystrom_papers.bench.floor import copy_bandwidth, copy_size


def test_a_copy_reads_and_writes_each_byte():
    times = iter([9.0, *(0.5, 0.5, 0.5, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0)])
    copied = []

    def seconds(call, device):
        copied.append(call().numel())
        return next(times)

    # The first call is a warm-up. Quartiles of times are those of bandwidths in reverse order.
    assert copy_bandwidth(torch.device("cpu"), 1000, seconds) == (2000.0, 1000.0, 4000.0)
    assert copied == [1000] * 10


def test_a_copy_takes_an_eighth_of_the_free_memory_at_most():
    assert copy_size(8000) == 1000
    assert copy_size(2**60) == 2**32


@pytest.mark.gpu
def test_the_bandwidth_of_a_gpu_is_one_that_gpus_have():
    middle, low, high = copy_bandwidth(torch.device("cuda", 0))
    assert 1e11 < low <= middle <= high < 2e13
