"""The figures of docs/gpu.md and docs/gpu-measured.md that no command prints there are those of the rows in results."""

from pathlib import Path

import pytest

from nystrom.attention.entry import _MEASURED_CAPABILITY
from nystrom.attention.options import NearFarOptions, NystromOptions, SkyformerOptions, near_far_sizes
from nystrom_lab.measure.rows import read_rows

ROOT = Path(__file__).resolve().parents[2]
DTYPES = ("float32", "float32 with TF32", "bfloat16", "float16")
MEASURED, GUIDE = ((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("gpu-measured.md", "gpu.md"))


def rows(name):
    return read_rows(ROOT / "results" / f"{name}.csv")


def times_in(name):
    """Times in ms by method, pass and length."""
    return {
        (row.method, row.quantity.removesuffix(" time"), row.n): row.value
        for row in rows(name)
        if row.quantity.endswith(" time")
    }


@pytest.fixture(scope="module")
def times():
    return times_in("gpu-lengths")


def shares(times, method, other):
    """The least and the largest time of a method beside another's."""
    found = [value / times[other, timed, n] for (m, timed, n), value in times.items() if m == method]
    return min(found), max(found)


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
    assert MEASURED.count(f"| {method}, scores times") == 2


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


PAIRS = [
    ("nystrom-64", "nystrom-triton-64"),
    ("nystrom-64+skip", "nystrom-triton-64+skip"),
    ("skyformer-128", "skyformer-triton-128"),
    ("near_far", "near_far-triton"),
    ("near_far-growing", "near_far-growing-triton"),
]
# For each file: rows of both passes at how many lengths, the width of heads, and its pairs.
AUTO = {
    "gpu-lengths": (12, "64", PAIRS),
    "gpu-single": (6, "64", [PAIRS[0], PAIRS[3], PAIRS[2]]),
    "gpu-wide": (2, "128", PAIRS),
}


@pytest.mark.parametrize("name", AUTO)
def test_auto_rests_on_kernels_that_were_faster_in_every_row(name):
    count, width, pairs = AUTO[name]
    for torch, kernels in pairs:
        found = [
            (times_in(name)[torch, timed, n], ours) for (m, timed, n), ours in times_in(name).items() if m == kernels
        ]
        assert len(found) == count
        assert all(ours < theirs for theirs, ours in found)
    assert {(row.dtype, row.fact("d")) for row in rows(name)} == {("bfloat16", width)}


def test_one_sequence():
    times = times_in("gpu-single")
    for torch, kernels in AUTO["gpu-single"][2]:
        least, most = shares(times, kernels, torch)
        assert f"| `{torch.partition('-')[0]}` | {least:.2f} to {most:.2f} |\n" in MEASURED


def test_a_whole_model():
    times = times_in("gpu-model")
    found = [shares(times, method, "softmax") for method in ("nystrom-triton-64+skip", "near_far-triton")]
    assert (
        f"takes {min(low for low, _ in found):.1f} to {max(high for _, high in found):.1f} times its time" in MEASURED
    )


def test_the_sizes_of_auto_are_those_of_the_guide():
    major, minor = _MEASURED_CAPABILITY
    assert f"compute capability {major}.{minor} (H100, H200) | one H100, one H200 |" in GUIDE
    for words, options, m in (
        ("landmarks in `nystrom`", NystromOptions, 64),
        ("in `skyformer`", SkyformerOptions, 128),
    ):
        assert [options(num_landmarks=m + more).measured_width for more in (0, 1)] == [128, 0]
        assert f"{m} {words}" in GUIDE
    assert "heads of up to 128 channels | 64 at 512 to 32,768 tokens; 128 at 16,384 |" in GUIDE
    widths = [NearFarOptions(**near_far_sizes(n, selects=False)).measured_width for n in (16384, 32768, 65536)]
    assert widths == [128, 64, 0]
    assert (
        "up to the sizes of `near_far_sizes(32768, selects=False)`, with heads of more than 64 channels of those for "
        "16,384" in GUIDE
    )
