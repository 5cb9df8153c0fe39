import time

import pytest
import torch

from nystrom.clock import seconds

CPU = torch.device("cpu")


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
