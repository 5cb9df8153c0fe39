"""Inputs that the kernels cannot take raise an error that names them and says what to do."""

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime.errors import OutOfResources

from nystrom import build_attention, near_far_attention, nystrom_attention, skyformer_attention
from nystrom.attention import entry
from nystrom.attention.entry import picks_triton
from nystrom.attention.registry import METHODS
from nystrom.gpu import launch
from nystrom.gpu.launch import Tiles, check_capability, check_launch, check_version, launching_on, splits, tiles, trying
from nystrom.gpu.program import Program

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def tensors(**shapes):
    return {name: torch.empty(shape, device=DEVICE) for name, shape in shapes.items()}


def qkv(d=8, e=8):
    return tensors(q=(1, 1, 50, d), k=(1, 1, 50, d), v=(1, 1, 50, e))


@pytest.mark.refuses
def test_a_gpu_with_too_little_shared_memory_is_named():
    little = OutOfResources(107_008, 101_376, "shared memory")
    said = r"too little shared memory .*it has 101376, they need 107008.*backend='torch'"
    with pytest.raises(RuntimeError, match=said), launching_on(torch.device("cpu")):
        raise little


@pytest.mark.refuses
@pytest.mark.parametrize(
    ("m", "given", "message"),
    [
        (257, qkv(), "num_landmarks is 257; expected at most 256.*backend='torch'"),
        (8, qkv(d=257), "q has head width 257; expected at most 256.*backend='torch'"),
        (8, qkv(e=300), "v has head width 300"),
        (8, {name: x.double() for name, x in qkv(d=65).items()}, "width 65; expected at most 64 in torch.float64"),
        (8, {name: x.to(torch.float8_e5m2) for name, x in qkv().items()}, "q has dtype torch.float8_e5m2"),
        (8, {**qkv(), "skip": torch.empty(1, 1, 3, 1, device="meta")}, "skip is on meta but q is on"),
        (8, {name: x.to("meta") for name, x in qkv().items()}, "needs a CUDA device, not meta.*backend='torch'"),
    ],
)
def test_inputs_that_no_kernel_is_made_for_raise(m, given, message):
    with pytest.raises(ValueError, match=message):
        check_launch(m, given)


def test_an_old_triton_raises():
    check_version("3.6.0")
    check_version("4.0")
    with pytest.raises(ValueError, match=r"triton 3\.1\.0 .* expected 3\.6 .*backend='torch'"):
        check_version("3.1.0")


def test_an_old_gpu_raises():
    check_capability((8, 0), torch.device("cuda", 0))
    with pytest.raises(ValueError, match=r"cuda:0 has compute capability 7\.5; expected 8\.0 .*backend='torch'"):
        check_capability((7, 5), torch.device("cuda", 0))


# A process decides this when it imports Triton: whether it is there, and whether kernels are interpreted.
MISSING = """
import sys
sys.modules["triton"] = None
"""
CALL = """
import torch
from nystrom import near_far_attention, nystrom_attention, skyformer_attention
from nystrom.attention.backend import kernel_errors
said = set()
# The first length is short: torch computes it, too.
for tokens in (3, 400):
    for attend in (near_far_attention, nystrom_attention, skyformer_attention):
        try:
            attend(*torch.zeros(3, 1, 1, tokens, 8), backend="triton")
        except ValueError as error:
            said.add(str(error))
print(*said, sep=" and ")
print(kernel_errors())
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("before", "wanted", "errors"),
    [
        (MISSING, ("needs the package triton", "pip install 'nystrom[gpu]'", "backend='torch'"), "()"),
        ("", ("needs a CUDA device, not cpu", "backend='torch'"), "TritonError"),
    ],
)
def test_a_missing_triton_and_a_cpu_without_the_interpreter_raise(before, wanted, errors):
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", before + CALL], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    message, caught = done.stdout.splitlines()
    assert all(words in message for words in wanted)
    assert " and backend" not in message
    assert errors in caught


def test_the_call_raises_where_the_launch_raises():
    q, k, v = (torch.zeros(1, 1, 400, 8, device=DEVICE) for _ in range(3))
    with pytest.raises(ValueError, match="num_landmarks is 300"):
        nystrom_attention(q, k, v, num_landmarks=300, backend="triton")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("nystrom", {"landmarks": "uniform"}, "no Triton code for landmarks='uniform': pass landmarks='segment_means'"),
        ("nystrom", {"pinv": "exact"}, "no Triton code for pinv='exact': pass pinv='iterative', or backend='torch'"),
        ("skyformer", {"pinv": "ridge"}, "no Triton code for pinv='ridge'"),
        ("skyformer", {"backend": "cuda"}, "backend is 'cuda'; expected one of 'auto', 'torch', 'triton'"),
    ],
)
def test_options_without_a_kernel_raise(name, options, message):
    with pytest.raises(ValueError, match=message):
        build_attention(name, num_heads=2, head_dim=4, **{"backend": "triton", **options})


ALL = {
    "nystrom": (nystrom_attention, {"num_landmarks": 4}),
    "skyformer": (skyformer_attention, {"num_landmarks": 4}),
    "near_far": (
        near_far_attention,
        {"num_heavy": 4, "num_clusters": 4, "block_size": 16, "reach": 2, "exact_up_to": 0},
    ),
}


def called(monkeypatch, name, *, measured=True, dtype=torch.bfloat16, width=8, **options):
    """Whether a call with backend "auto" runs the kernels, on a device that counts as measured, or does not."""
    monkeypatch.setattr(entry, "_is_measured", lambda device: measured)
    found, run = [], Program.__call__

    def launched(*given):
        found.append(name)
        return run(*given)

    monkeypatch.setattr(Program, "__call__", launched)
    attend, sizes = ALL[name]
    g = torch.Generator(DEVICE).manual_seed(0)
    q, k, v = (torch.randn(1, 1, 70, width, generator=g, device=DEVICE).to(dtype) for _ in range(3))
    out = attend(q, k, v, **{**sizes, **options})
    monkeypatch.setattr(Program, "__call__", run)
    wanted = attend(q, k, v, **{**sizes, **options}, backend="triton" if found else "torch")
    assert torch.equal(out, wanted)
    return bool(found)


@pytest.mark.long
@pytest.mark.parametrize("name", ALL)
def test_auto_means_the_kernels_where_they_were_measured(name, monkeypatch):
    assert called(monkeypatch, name)
    assert not called(monkeypatch, name, measured=False)
    assert not called(monkeypatch, name, dtype=torch.float32)
    assert not called(monkeypatch, name, width=129)


@pytest.mark.parametrize(
    ("triton", "cuda", "capability", "measured"),
    [
        ("3.6.0", "13.0", (9, 0), True),
        ("3.5.0", "13.0", (9, 0), False),
        ("3.6.0", "13.0", (8, 0), False),
        ("3.6.0", "13.0", (7, 5), False),
        ("3.6.0", None, (9, 0), False),
    ],
)
def test_what_counts_as_measured(triton, cuda, capability, measured, monkeypatch):
    monkeypatch.setattr(launch.triton, "__version__", triton)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    launch._capability.cache_clear()
    assert entry._is_measured(torch.device("cuda:0")) == measured
    launch._capability.cache_clear()
    assert not entry._is_measured(torch.device("cpu"))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("nystrom", {"num_landmarks": 65}),
        ("nystrom", {"landmarks": "kmeans"}),
        ("nystrom", {"pinv": "exact"}),
        ("nystrom", {"z0": "sequence"}),
        ("skyformer", {"num_landmarks": 129}),
        ("skyformer", {"kernel": "laplace"}),
        ("near_far", {"num_clusters": 641}),
        ("near_far", {"num_selected": 4}),
    ],
)
def test_auto_means_torch_for_options_that_were_not_measured(name, options, monkeypatch):
    monkeypatch.setattr(entry, "_is_measured", lambda device: True)
    q = torch.zeros(1, 1, 9, 8, device=DEVICE, dtype=torch.bfloat16)
    assert picks_triton(METHODS[name].options(), q, q, q)
    assert not picks_triton(METHODS[name].options(**options), q, q, q)


@pytest.mark.long
@pytest.mark.parametrize("name", ALL)
def test_auto_does_not_depend_on_length_and_mask(name, monkeypatch):
    keep = torch.arange(70, device=DEVICE)[None] < 40
    assert called(monkeypatch, name, keep=keep)


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 1000])
@pytest.mark.parametrize("programs", [1, 7, 1000])
@pytest.mark.parametrize("m", [1, 20])
def test_spans_cover_all_tokens_once(tokens, programs, m):
    count, span = splits(tokens, programs, m, 64, torch.device(DEVICE))
    assert count == 1 or span >= 32 * m
    assert span % 64 == 0
    assert (count - 1) * span < tokens <= count * span


def test_blocks_hold_the_widths():
    sizes = tiles(5, 17, 40, torch.bfloat16, torch.device(DEVICE))
    assert (sizes.block_m, sizes.block_d, sizes.block_e) == (16, 32, 64)


def test_tiles_are_smaller_where_a_program_has_less_shared_memory(monkeypatch):
    def of(row, shared):
        monkeypatch.setattr(launch, "shared_memory", lambda device: shared)
        sizes = tiles(256, row // 2, 16, torch.bfloat16, torch.device(DEVICE))
        return sizes.block_n * sizes.block_m

    for row in (256, 512):
        assert of(row, 101376) < of(row, 166912) == of(row, 232448)


@pytest.mark.long
def test_tiles_can_be_tried_and_change_no_result():
    q, k, v = (torch.randn(1, 2, 90, 8, dtype=torch.float64, device=DEVICE) for _ in range(3))
    expected = nystrom_attention(q, k, v, num_landmarks=20, backend="triton")
    with trying(Tiles(16, 16, 1, 1)):
        assert tiles(20, 8, 8, torch.float64, torch.device(DEVICE)) == Tiles(16, 16, 16, 16)
        out = nystrom_attention(q, k, v, num_landmarks=20, backend="triton")
    assert tiles(20, 8, 8, torch.float64, torch.device(DEVICE)) != Tiles(16, 16, 16, 16)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-10)
