"""A call passes few files: whoever reads or steps through it opens no more than these, one of them the list of torch's
private names."""

import sys
from pathlib import Path

import pytest
import torch

import nystrom
from nystrom import MultiheadAttention, NystromAttention, near_far_attention, nystrom_attention

HOME = str(Path(nystrom.__file__).parent)
NEAR_FAR = {"num_heavy": 8, "num_clusters": 16, "exact_up_to": 32}
KEEP = torch.arange(300) < torch.tensor([[300], [200]])


def of_function(function, **options):
    q = torch.randn(2, 2, 300, 8)
    return lambda: function(q, q, q, keep=KEEP, **options)


def of_layer(layer):
    return lambda: layer(torch.randn(2, 300, 16), key_padding_mask=~KEEP)


@pytest.mark.parametrize(
    ("call", "most"),
    [
        (of_function(nystrom_attention, num_landmarks=16), 13),
        (of_function(near_far_attention, **NEAR_FAR), 16),
        (of_layer(MultiheadAttention(16, 2, method="nystrom", num_landmarks=16)), 17),
        (of_layer(NystromAttention(16, 2, num_landmarks=16)), 18),
        (of_layer(MultiheadAttention(16, 2, method="near_far", **NEAR_FAR)), 20),
    ],
)
def test_a_call_passes_few_files(call, most):
    files, before = set(), sys.getprofile()

    def note(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(HOME):
            files.add(frame.f_code.co_filename)

    call()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    assert 5 < len(files) <= most, files
