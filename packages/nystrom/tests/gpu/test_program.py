"""Programs: what they are built for, what they keep, and that other memory of the same form gives the same results."""

import functools
import gc
import os
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from nystrom import near_far_attention, nystrom_attention, skyformer_attention
from nystrom.gpu import landmark_attention
from nystrom.gpu.launch import Tiles, target_of, trying
from nystrom.gpu.near_far import choice
from nystrom.gpu.near_far import near_far_attention as near_far
from nystrom.gpu.program import PROGRAMS, Program, Slot, key_of

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ATTEND = {
    "nystrom": functools.partial(nystrom_attention, num_landmarks=4, backend="triton"),
    "skyformer": functools.partial(skyformer_attention, num_landmarks=4, backend="triton"),
    "near_far": functools.partial(
        near_far_attention, num_heavy=4, num_clusters=4, block_size=16, reach=2, exact_up_to=0, backend="triton"
    ),
}
CACHES = (
    landmark_attention.forward_program, landmark_attention.backward_program,
    near_far.forward_program, near_far.backward_program,
    near_far.whole_program, choice.program_of,
)  # fmt: skip
each_method = pytest.mark.parametrize("attend", ATTEND.values(), ids=ATTEND)


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def draw_qkv(n=20):
    return [draw(1, 1, n, 8, seed=seed) for seed in range(3)]


def both_passes(attend, q, k, v):
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    out = attend(*inputs)
    return out.detach(), *torch.autograd.grad(out.square().sum(), inputs)


@each_method
def test_programs_keep_no_tensor_alive(attend):
    inputs = [x.requires_grad_() for x in draw_qkv()]
    out = attend(*inputs)
    gradients = torch.autograd.grad(out.sum(), inputs)
    tensors = [*inputs, out, *gradients]
    # Storages, too: a view of one would keep its memory.
    left = [weakref.ref(x) for tensor in tensors for x in (tensor, tensor.untyped_storage())]
    del inputs, out, gradients, tensors
    gc.collect()
    assert [found() for found in left] == [None] * len(left)


def test_a_bounded_number_of_programs_is_kept():
    assert {cache.cache_info().maxsize for cache in CACHES} == {PROGRAMS}


def built_for(x):
    given = key_of(x, x, x, None, None, None, None)
    return landmark_attention.forward_program(given, target_of(DEVICE), 4, 0.5, 6, "paper", -1.0)


def test_another_form_is_another_program():
    x = draw(1, 2, 20, 8)
    program = built_for(x)
    assert built_for(draw(1, 2, 20, 8, seed=1)) is program
    others = [
        draw(1, 2, 21, 8),
        draw(1, 20, 2, 8).transpose(1, 2),
        x.bfloat16(),
        # A tensor of the same shape and strides, at an address that is no multiple of 16.
        draw(1 * 2 * 20 * 8 + 1)[1:].view(1, 2, 20, 8),
    ]
    found = {id(built_for(other)) for other in others}
    with trying(Tiles(16, 16, 1, 1)):
        found.add(id(built_for(x)))
    assert len(found | {id(program)}) == len(others) + 2
    assert built_for(x) is program


@each_method
def test_results_do_not_depend_on_where_tensors_are(attend):
    wanted = both_passes(attend, *draw_qkv())
    memory = draw(3 * 20 * 8 + 1)
    moved = memory[1:].view(3, 1, 1, 20, 8)
    moved.copy_(torch.stack(draw_qkv()))
    assert moved.data_ptr() % 16
    assert all(map(torch.equal, both_passes(attend, *moved), wanted))


@each_method
def test_queries_keys_and_values_may_be_one_tensor(attend):
    x = draw(1, 1, 20, 8)
    assert all(map(torch.equal, both_passes(attend, x, x, x), both_passes(attend, x, x.clone(), x.clone())))


def test_threads_that_build_one_program_at_once_get_right_ones():
    x = draw(1, 1, 23, 8)
    start = threading.Barrier(2, timeout=60)
    landmark_attention.forward_program.cache_clear()

    def build():
        start.wait()
        return built_for(x)

    with ThreadPoolExecutor(2) as pool:
        programs = [each.result() for each in [pool.submit(build) for _ in range(2)]]
    # One after the other: the interpreter of kernels changes Triton while it runs.
    wanted = nystrom_attention(x, x, x, num_landmarks=4, scale=0.5, backend="triton")
    for program in programs:
        assert torch.equal(program(x, x, x, None, None, None, None)[1], wanted)


def test_a_program_without_a_workspace_writes_its_results():
    x = draw(2, 3)
    program = Program(key_of(x))
    result = program.result((2, 3), x.dtype)
    program.torch(lambda x, result: result.copy_(2 * x), *program.inputs, result)
    (found,) = program(x)
    assert torch.equal(found, 2 * x)


def test_parts_of_a_workspace_begin_apart_and_are_taken_again():
    program = Program(key_of(draw(2, 3)))
    first = program.scratch((3,), torch.float32)
    with program.reused():
        second = program.scratch((5, 7), torch.int64)
    third = program.scratch((1,), torch.float64)
    assert (first.offset, second.offset, third.offset) == (0, 512, 512)
    assert isinstance(second, Slot)
    assert second.stride() == (7, 1)


# Without a GPU the process of the tests interprets kernels, so another process compiles one, and launches nothing.
LAUNCHES = """
import torch
from triton import knobs
from nystrom.gpu.near_far.span_sums import near_far_first
from nystrom.gpu.program import Program, key_of
from tools.kernel_accounting.driver import OfflineDriver, Shape

seen = []
driver = OfflineDriver("9.0", Shape(1, 1, 8, 16, 4, torch.float32))
driver.launcher_cls = lambda source, metadata: lambda *given: seen.append(given)
driver.get_current_stream = lambda device: 5
keep = torch.ones(3, 8, dtype=torch.bool)
program = Program(key_of(keep))
program.launch(near_far_first, 3, *program.inputs, program.result((3,), torch.int32), 8, BLOCK=16)
heard = []
with driver.active():
    program(keep)
    program(keep)
    knobs.runtime.launch_enter_hook.add(heard.append)
    program(keep)
first, again, listened = seen
# Grid, stream, function and metadata; then the argument of a hook, two hooks, and the arguments.
assert first[:6] == again[:6] == listened[:6] and first[:4] == (3, 1, 1, 5), seen
assert again[6:9] == (None, None, None) and listened[7] is knobs.runtime.launch_enter_hook, seen
assert listened[6].get()["stream"] == 5
keys, result, *numbers = first[9:]
for _, _, _, *rest in (again[6:], listened[6:]):
    assert rest[0] == keep.data_ptr() == keys.data_ptr() and isinstance(rest[1], int) and rest[2:] == numbers, seen
"""


@pytest.mark.long
def test_a_compiled_kernel_is_launched_as_triton_does():
    done = subprocess.run(
        [sys.executable, "-c", LAUNCHES],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        cwd=Path(__file__).resolve().parents[4],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
