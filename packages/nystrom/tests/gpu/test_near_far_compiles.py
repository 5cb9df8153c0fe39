"""The kernels of near_far compile and fit, with much and with little shared memory, without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from tools.kernel_accounting.analysis import SHARED_MEMORY

# Without a GPU the process of the tests interprets kernels, so another process compiles them, on tensors of no numbers.
CODE = """
import dataclasses, json, sys
from unittest import mock
import torch
from nystrom.gpu import launch
from nystrom.gpu.near_far import choice, near_far_positions
from nystrom.gpu.near_far.near_far_attention import backward_program, forward_program
from nystrom.gpu.program import key_of
from nystrom.precision import accumulator
from tools.kernel_accounting.analysis import SHARED_MEMORY
from tools.kernel_accounting.driver import OfflineDriver, Shape

capability, name, d, e, masked, block = json.loads(sys.argv[1])
dtype, b, h, n, m, g = getattr(torch, name), 2, 4, 4096, 64, 48
driver = OfflineDriver(capability, Shape(b, h, n, d, m, dtype))
q, k, v, grad = (torch.empty(b, n, h, width, dtype=dtype, device="meta").transpose(1, 2) for width in (d, d, e, e))
heavy, exists, cluster = (
    torch.empty(b, h, tokens, dtype=kind, device="meta")
    for tokens, kind in ((g, torch.int64), (g, torch.bool), (n, torch.int32))
)
keep = torch.empty(b, n, dtype=torch.bool, device="meta") if masked else None
with (
    driver.active(),
    mock.patch.object(launch, "check_device", return_value=None),
    mock.patch.object(launch, "multiprocessors", return_value=132),
    mock.patch.object(launch, "shared_memory", return_value=SHARED_MEMORY[capability]),
    mock.patch.object(choice, "shared_memory", return_value=SHARED_MEMORY[capability]),
):
    def run(build, *inputs, sizes=(m, block, 8, d**-0.5)):
        return build(key_of(*inputs), launch.target_of(q.device), *sizes)(*inputs)

    tokens = (q, k, v, heavy, exists, cluster, keep)
    kept, out = run(forward_program, *tokens)
    run(backward_program, grad, kept, out, *tokens)
    run(choice.program_of, q, k, keep, keep, sizes=(8, g, m, 4, d**-0.5))
    if block:
        shapes = (h, 257), (b, h, m, d), (b, h, n // block, m, e), (b, h, n // block, m)
        given = [torch.empty(shape, dtype=accumulator(dtype), device="meta") for shape in shapes]
        tokens, sizes = (q, k, v, *given, heavy, exists, cluster), (block, 8, d**-0.5)
        logs, out = run(near_far_positions.forward_program, *tokens, sizes=sizes)
        run(near_far_positions.backward_program, grad, logs, out, *tokens, sizes=sizes)
print(json.dumps([dataclasses.asdict(each) for each in driver.launches]))
"""
FORWARD, BACKWARD = ["totals", "joined", "forward"], ["queries", "shared", "joined", "keys", "shared", "heavy"]
OF_THE_CHOICE = ["middle", "segments", "scores", "order", "groups", "taken", *3 * ["nearest", "moved"], "nearest"]
WITH_POSITIONS = ["forward", "queries", "shared", "window", "keys", "shared", "heavy"]
ROOT = Path(__file__).resolve().parents[4]


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["8.6", "9.0"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    ("d", "e", "masked", "block"), [(64, 64, True, 64), (128, 128, False, 64), (64, 128, True, 0), (16, 16, False, 32)]
)
def test_every_kernel_compiles_and_fits(capability, dtype, d, e, masked, block):
    done = subprocess.run(
        [sys.executable, "-c", CODE, json.dumps([capability, dtype, d, e, masked, block])],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    launches = json.loads(done.stdout)
    first, ranks = (["first"], ["ranks"]) if masked else ([], [])
    kernels = [*first, *FORWARD, *first, *BACKWARD, *ranks, *OF_THE_CHOICE, *(WITH_POSITIONS if block else [])]
    assert [each["kernel"] for each in launches] == [f"near_far_{name}" for name in kernels]
    for each in launches:
        assert each["shared"] <= SHARED_MEMORY[capability], each
        assert 0 < each["registers"] <= 255, each
