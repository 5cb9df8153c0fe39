import pytest
import torch

from nystrom_lab.measure.memory import check_memory, free_bytes


def test_free_memory_is_some_of_the_machines():
    assert 2**20 < free_bytes(torch.device("cpu")) < 2**50


@pytest.mark.gpu
def test_on_a_gpu_free_memory_is_that_of_the_device():
    assert free_bytes(torch.device("cuda", 0)) > 2**20


@pytest.mark.parametrize(("layers", "width"), [(2, 10**9), (10**7, 8)])
def test_what_no_memory_holds_is_refused(layers, width):
    with pytest.raises(ValueError, match=r"but this machine has .* GB: take a smaller one") as error:
        check_memory(layers=layers, width=width, intermediate=8, vocabulary=30, numbers=1)
    assert f"{layers:,} layers, width {width:,}" in str(error.value)
    check_memory(layers=2, width=8, intermediate=8, vocabulary=30, numbers=4)
