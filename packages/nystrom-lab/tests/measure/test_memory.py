import pytest
import torch

from nystrom_lab.measure.memory import free_bytes


def test_free_memory_is_some_of_the_machines():
    assert 2**20 < free_bytes(torch.device("cpu")) < 2**50


@pytest.mark.gpu
def test_on_a_gpu_free_memory_is_that_of_the_device():
    assert free_bytes(torch.device("cuda", 0)) > 2**20
