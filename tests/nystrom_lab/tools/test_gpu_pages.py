"""The figures of docs/gpu.md and docs/gpu-measured.md that no command prints there are those of the rows in results."""

from pathlib import Path

import pytest

from nystrom.attention.backend import _MEASURED_CAPABILITY, _MEASURED_WIDTH
from nystrom.attention.options import NearFarOptions, NystromOptions, SkyformerOptions, near_far_sizes
from nystrom_lab.measure.rows import read_rows

ROOT = Path(__file__).resolve().parents[3]
DTYPES = ("float32", "float32 with TF32", "bfloat16", "float16")
MEASURED, GUIDE = ((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("gpu-measured.md", "gpu.md"))
GATHERED = {
    "choice": "choosing: means of 16 queries times all keys, the 96 largest",
    "gather": "gathering 96 keys and values for each 16 queries",
    "products": "fused attention to the gathered keys",
    "same products, shared keys": "fused attention of all queries to the same 96 keys",
    "near_far-triton": "near_far by its kernels, whole",
    "softmax": "exact attention, fused, whole",
}


def rows(name):
    return read_rows(ROOT / "results" / f"{name}_h200_2026-11-27.csv")


@pytest.fixture(scope="module")
def times():
    """Times in ms by method, pass and length."""
    return {
        (row.method, row.quantity.removesuffix(" time"), row.n): row.value
        for row in rows("gpu-lengths")
        if row.quantity.endswith(" time")
    }


@pytest.mark.parametrize(
    ("method", "scale"), [(m, s) for m in ("nystrom", "skyformer", "near_far") for s in ("1", "3", "30")]
)
def test_errors(method, scale):
    found = {(row.method, row.dtype, row.fact("scale")): [] for row in rows("gpu-errors")}
    for row in rows("gpu-errors"):
        found[row.method, row.dtype, row.fact("scale")].append(row.value)
    for backend in ("torch", "triton"):
        line = " | ".join(f"{max(found[f'{method}-{backend}', dtype, scale]):.1e}" for dtype in DTYPES)
        shown = f"| {method}, scores times {scale} | {backend} |"
        assert shown not in MEASURED or f"{shown} {line} |\n" in MEASURED
    assert MEASURED.count(f"| {method}, scores times") == 4


def test_gathered_keys():
    found = {(row.method, row.n): row.value for row in rows("gpu-gather")}
    for method, words in GATHERED.items():
        assert f"| {words} | {found[method, 2048]:.2f} | {found[method, 8192]:.2f} |\n" in MEASURED


def test_ratios_to_the_published_formula(times):
    ratio = {
        (skip, timed): times[f"authors-64{skip}", timed, 32768] / times[f"nystrom-triton-64{skip}", timed, 32768]
        for skip in ("", "+skip")
        for timed in ("forward", "forward+backward")
    }
    plain, skip = ([f"{ratio[name, timed]:.1f}" for timed in ("forward", "forward+backward")] for name in ("", "+skip"))
    said = f"{plain[0]} times less forward and {plain[1]} in training, with the skip {skip[0]} and {skip[1]}."
    assert said in MEASURED


@pytest.mark.parametrize(
    ("words", "methods"),
    [
        ("`nystrom`, 64 landmarks, with or without the skip", ("nystrom-triton-64", "nystrom-triton-64+skip")),
        ("`near_far`, default sizes", ("near_far-triton",)),
        ("`skyformer`, 128 landmarks", ("skyformer-triton-128",)),
    ],
)
def test_lengths_from_which_the_kernels_win(words, methods, times):
    lengths = sorted({n for _, _, n in times})
    won = []
    for timed in ("forward", "forward+backward"):
        losing = [n for n in lengths if any(times[m, timed, n] >= times["softmax", timed, n] for m in methods)]
        won.append(f"{lengths[lengths.index(max(losing)) + 1]:,}")
    assert f"| {words} | {won[0]} | {won[1]} |\n" in GUIDE


@pytest.mark.parametrize(
    ("torch", "kernels"),
    [
        ("nystrom-64", "nystrom-triton-64"),
        ("nystrom-64+skip", "nystrom-triton-64+skip"),
        ("skyformer-128", "skyformer-triton-128"),
        ("near_far", "near_far-triton"),
        ("near_far-growing", "near_far-growing-triton"),
    ],
)
def test_auto_rests_on_kernels_that_were_faster_at_every_length(torch, kernels, times):
    found = [(times[torch, timed, n], times[kernels, timed, n]) for m, timed, n in times if m == kernels]
    assert len(found) == 12
    assert all(ours < theirs for theirs, ours in found)
    assert {(row.dtype, row.fact("d")) for row in rows("gpu-lengths")} == {("bfloat16", "64")}


def test_the_sizes_of_auto_are_those_of_the_guide():
    major, minor = _MEASURED_CAPABILITY
    assert f"compute capability {major}.{minor} (H100, H200) | one H200 |" in GUIDE
    assert f"heads of up to {_MEASURED_WIDTH} channels | {_MEASURED_WIDTH} |" in GUIDE
    for words, options, m in (
        ("landmarks in `nystrom`", NystromOptions, 64),
        ("in `skyformer`", SkyformerOptions, 128),
    ):
        assert options(num_landmarks=m).measured > options(num_landmarks=m + 1).measured
        assert f"{m} {words}" in GUIDE
    assert NearFarOptions(**near_far_sizes(32768)).measured > NearFarOptions(**near_far_sizes(65536)).measured
    assert "up to the sizes of `near_far_sizes(32768)`" in GUIDE
