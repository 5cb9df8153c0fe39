import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from nystrom.gpu.arithmetic import INTERPRETED
from tools.kernel_accounting.analysis import SHARED_MEMORY, Operators, analyse
from tools.kernel_accounting.driver import Shape

# Without a GPU the process of the tests interprets kernels, so another process compiles them.
CODE = """
import dataclasses, json, sys
import torch
from tools.kernel_accounting.analysis import Shape, analyse

for words in json.loads(sys.argv[2]):
    words["dtype"] = getattr(torch, words["dtype"])
    passages = analyse(Shape(**words), capability=sys.argv[1])
    print(json.dumps([dataclasses.asdict(passage) for passage in passages]))
"""
PLAIN = {"batch": 2, "heads": 4, "tokens": 4096, "width": 64, "landmarks": 64, "dtype": "bfloat16"}
FORWARD = ["means", "right_forward", "middle_forward", "left_forward"]
BACKWARD = [
    *("left_landmarks", "middle_backward", "inverse_whole", "inverse_whole_backward", "right_queries"),
    *("table_backward", "left_queries", "right_keys"),
]
# For Skyformer.
OF_BLOCKS = (
    ["plan", "means", "right_forward", "combine", "matrix_blocks", "inverse_blocks", "middle_blocks"],
    [
        *("plan", "left_landmarks", "matrix_blocks", "middle_blocks_backward", "inverse_blocks"),
        *("inverse_blocks_backward", "right_queries", "table_blocks_backward", "left_queries", "right_keys"),
    ],
)
ROOT = Path(__file__).resolve().parents[3]
# One tensor of tokens.
TOKENS = 2 * 4 * 4096 * 64 * 2


def analysed(*shapes, capability="9.0"):
    """Both passes for each shape, the launches of each by the name of their kernel."""
    done = subprocess.run(
        [sys.executable, "-c", CODE, capability, json.dumps(shapes)],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(results) == len(shapes)
    for passages in results:
        for passage in passages:
            passage["kernels"] = {each["kernel"]: each for each in passage["launches"]}
    return results


@pytest.fixture(scope="module")
def skipped():
    """With a skip and the sizes of the papers."""
    return analysed(PLAIN | {"taps": 33})[0]


@pytest.mark.slow
def test_every_kernel_of_both_passes_is_launched_once(skipped):
    forward, backward = skipped
    assert [each["kernel"] for each in forward["launches"]] == FORWARD
    assert [each["kernel"] for each in backward["launches"]] == [*BACKWARD, "skip_taps", "add_up"]
    assert forward["operators"] == backward["operators"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["8.6", "9.0"])
def test_skyformer_and_many_landmarks_need_kernels_alone_that_fit(capability):
    gaussian = PLAIN | {"gaussian": True}
    shapes = (
        *(gaussian | {"landmarks": m, "width": d, "masked": d > 64} for m, d in ((128, 64), (256, 128), (48, 256))),
        *(PLAIN | {"landmarks": 256, "width": d, "masked": True} for d in (64, 256)),
        PLAIN | {"landmarks": 256, "width": 256, "dtype": "float32"},
    )
    results = analysed(*shapes, capability=capability)
    for passages in results:
        for passage in passages:
            assert passage["operators"] == 0
            for each in passage["launches"]:
                assert each["shared"] <= SHARED_MEMORY[capability], each
                assert 0 < each["registers"] <= 255, each
    for passage, kernels in zip(results[0], OF_BLOCKS, strict=True):
        assert [each["kernel"] for each in passage["launches"]][: len(kernels)] == kernels


@pytest.mark.slow
def test_all_kernels_fit_and_those_over_tokens_spill_nothing_forward(skipped):
    for passage in skipped:
        for each in passage["launches"]:
            assert each["shared"] <= SHARED_MEMORY["9.0"]
            assert 0 < each["registers"] <= 255
    assert [skipped[0]["kernels"][name]["stack"] for name in ("means", "right_forward", "left_forward")] == [0, 0, 0]


@pytest.mark.slow
def test_tokens_count_once_for_each_time_that_programs_go_over_them(skipped):
    forward, backward = skipped
    passes = {name: each["token_bytes"] / TOKENS for name, each in forward["kernels"].items()}
    assert passes == {"means": 2, "right_forward": 2, "middle_forward": 0, "left_forward": 3}
    passes = {name: each["token_bytes"] / TOKENS for name, each in backward["kernels"].items()}
    assert passes.pop("skip_taps") == 2
    assert passes.pop("add_up") == 0
    assert passes == {
        **{"left_landmarks": 2, "right_queries": 2, "left_queries": 3, "right_keys": 5},
        **dict.fromkeys(("middle_backward", "inverse_whole", "inverse_whole_backward", "table_backward"), 0),
    }


@pytest.mark.slow
def test_small_tensors_count_once(skipped):
    heads, m, width, taps = 2 * 4, 64, 64, 33
    matrix, rows, float32 = heads * m * m, heads * m, 4
    kernels = skipped[0]["kernels"]
    small = {name: each["bytes"] - each["token_bytes"] for name, each in kernels.items()}
    spans = kernels["right_forward"]["programs"] // heads
    assert spans > 1
    assert small == {
        "means": float32 * 2 * rows * (width + 1),
        "right_forward": float32 * (2 * rows * width + spans * rows * (width + 2)),
        "middle_forward": float32 * ((spans + 1) * rows * (width + 2) + 3 * rows * width + matrix),
        "left_forward": float32 * 2 * rows * width + 4 * taps * 2,
    }


@pytest.mark.slow
def test_memory_beyond_the_results_does_not_grow_with_the_tokens():
    # Both lengths are cut into as many spans as the multiprocessors need.
    once, twice = analysed(*(PLAIN | {"taps": 33, "tokens": 64 * n} for n in (4096, 8192)))
    assert once[0]["kernels"]["right_forward"]["programs"] == twice[0]["kernels"]["right_forward"]["programs"]
    for results, short, long in zip((1, 4), once, twice, strict=True):
        extra = short["memory"] - results * 64 * TOKENS
        # 5 % of queries, keys, values and output
        assert 0 < extra < 0.05 * 4 * 64 * TOKENS
        assert long["memory"] - results * 128 * TOKENS == extra


@pytest.mark.slow
def test_what_a_kernel_does_not_touch_is_not_counted():
    without, drawn, many = analysed(
        PLAIN, PLAIN | {"gaussian": True, "landmarks": 32}, PLAIN | {"landmarks": 200, "masked": True}
    )
    # They get the values and the gradient though there is no skip.
    assert without[0]["kernels"]["left_forward"]["token_bytes"] == 2 * TOKENS
    assert without[1]["kernels"]["right_keys"]["token_bytes"] == 4 * TOKENS
    # Landmarks are drawn tokens, and no others are read.
    assert drawn[0]["kernels"]["means"]["token_bytes"] == 2 * 4 * 32 * 64 * 2
    # More landmarks than a block has: their programs each walk over the tokens, and the mask of one byte a token.
    assert many[0]["kernels"]["right_forward"]["token_bytes"] == 4 * (2 * TOKENS + 2 * 4096)
    assert "left_statistics" in many[1]["kernels"]


def test_interpreted_kernels_raise_with_the_way_out():
    if not INTERPRETED.value:
        pytest.skip("kernels are compiled here")
    with pytest.raises(ValueError, match=r"TRITON_INTERPRET is set, .* unset it"):
        analyse(Shape(1, 1, 4096, 64, 64, torch.bfloat16))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"capability": "9.5"}, "capability is '9.5'"),
        ({"landmarks": 257}, "landmarks is 257; the kernels take 1 to 256"),
        ({"width": 512}, "width is 512; the kernels take 1 to 256"),
        ({"tokens": 128}, "tokens is 128 with 64 landmarks.*pass 129"),
        ({"taps": 4}, "taps is 4"),
        ({"taps": 3, "gaussian": True}, "taps is 3.* 0 for Skyformer"),
    ],
)
def test_what_kernels_do_not_take_raises(change, message):
    words = PLAIN | {"dtype": torch.bfloat16} | change
    with pytest.raises(ValueError, match=message):
        analyse(
            Shape(**{k: v for k, v in words.items() if k != "capability"}), capability=words.get("capability", "9.0")
        )


def test_operators_that_compute_are_counted_with_their_bytes_and_views_are_not():
    x = torch.zeros(10, 10)
    with Operators() as operators:
        (x.mT[:5].unsqueeze(0) * 2).sum()
        torch.empty(1000)
    assert operators.count == 2
    # 50 in and 50 out, then 50 in and 1 out.
    assert operators.bytes == 4 * (50 + 50 + 50 + 1)


def test_memory_is_that_of_the_tensors_which_live_together():
    x = torch.zeros(100)
    with Operators() as operators:
        y = x + 1
        z = y.view(10, 10) + 1
        del y
        x += 1
        _ = z * 2
    assert operators.most == 4 * 200
    assert operators.held == 4 * 200
    del _, z
    assert operators.held == 0


@pytest.mark.long
@pytest.mark.parametrize("capability", ["8.0", "9.0"])
def test_a_skip_in_float32_fits(capability):
    shape = {**PLAIN, "dtype": "float32", "width": 64, "landmarks": 64, "taps": 33}
    (passages,) = analysed(shape, capability=capability)
    shared = {each["kernel"]: each["shared"] for passage in passages for each in passage["launches"]}
    assert {name: size for name, size in shared.items() if size > SHARED_MEMORY[capability]} == {}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("width", [16, 64, 128, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    ("capability", "landmarks", "masks"),
    [("9.0", (16, 64, 128, 256), (False, True)), ("8.0", (64, 256), (True,)), ("8.6", (64, 256), (True,))],
)
def test_everything_compiles_and_fits(capability, landmarks, masks, dtype, width):
    shapes = [
        {**PLAIN, "dtype": dtype, "width": width, "landmarks": m, "masked": masked, "gaussian": gaussian}
        | {"taps": 0 if gaussian else 33}
        for m in landmarks
        for masked in masks
        for gaussian in (False, True)
    ]
    too_large = [
        (shape["landmarks"], shape["masked"], shape["gaussian"], each["kernel"], each["shared"])
        for shape, passages in zip(shapes, analysed(*shapes, capability=capability), strict=True)
        for passage in passages
        for each in passage["launches"]
        if each["shared"] > SHARED_MEMORY[capability]
    ]
    assert too_large == []
