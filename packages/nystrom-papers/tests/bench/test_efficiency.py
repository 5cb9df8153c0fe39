import dataclasses
import functools
import inspect
import math
import re
import shlex
import subprocess

import pytest
import torch

from nystrom_lab.cli.arguments import call
from nystrom_lab.measure.rows import read_rows
from nystrom_papers.bench.by_length import Cell, cells_of, length_setup, sweep_lengths
from nystrom_papers.bench.contenders import Contender
from nystrom_papers.bench.efficiency import EfficiencyOptions, run_efficiency
from nystrom_papers.bench.inputs import Call, Sizes
from nystrom_papers.bench.options import command_line

CPU = torch.device("cpu")

SMALL = {"lengths": (16, 32), "methods": ("softmax", "nystrom-8"), "batch": 1, "heads": 2, "width": 8, "repeats": 3}
SMALL |= {"kernel_size": 3}


@pytest.fixture
def measured(capsys):
    """Returns the lengths measured since the last call, in order, as the run reports them."""
    return lambda: [int(n) for n in re.findall(r"^n=(\d+): \d+ of", capsys.readouterr().err, flags=re.MULTILINE)]


def cells(*passes, **builds):
    """Methods that a function builds."""
    return tuple(
        Cell(name, Contender(build), 0, False, timed)
        for name, build in builds.items()
        for timed in passes or ("forward", "forward+backward")
    )


def setup(cells, *, dtype="float32", threads=None, limit_seconds=60.0, repeats=3, bandwidth=None, **changes):
    """The setup of `run_efficiency` with these methods."""
    options = EfficiencyOptions(dtype=dtype, threads=threads, limit_seconds=limit_seconds, repeats=repeats)
    sizes = Sizes(1, 2, 8, 3, getattr(torch, dtype), CPU, "tokens")
    command = "nystrom bench efficiency --lengths 16"
    made = length_setup(
        options, "efficiency", cells=cells, sizes=sizes, shape={"b": 1}, command=command, bandwidth=bandwidth
    )
    return dataclasses.replace(made, **changes)


def test_rows_hold_each_method_pass_quantity_and_length(tmp_path):
    rows = run_efficiency(EfficiencyOptions(**SMALL, seed=3, to=tmp_path))
    expected = [
        (n, method, f"{timed} {what}")
        for n in (16, 32)
        for method in ("softmax", "nystrom-8", "nystrom-8+skip")
        for timed in ("forward", "forward+backward")
        for what in ("time", "memory")
    ]
    assert [(row.n, row.method, row.quantity) for row in rows] == expected
    assert read_rows(tmp_path / "efficiency.csv") == rows
    for row in rows:
        timed = row.quantity.endswith("time")
        assert (row.study, row.unit, row.repeats) == ("efficiency", "ms" if timed else "MB", 3 if timed else 1)
        assert (row.dtype, row.seed, row.note) == ("float32", 3, "")
        assert row.m == (None if row.method == "softmax" else 8)
        assert row.value > 0
        assert row.low <= row.value <= row.high if timed else row.low is row.high is None
        words = f"b=1 h=2 d=8 kernel=3 layout=tokens threads={torch.get_num_threads()} allocator=default"
        assert sorted(row.words.split()) == sorted(words.split())


def test_the_skip_can_be_left_or_asked_for(tmp_path):
    for skip, methods in (("without", ["softmax", "nystrom-8"]), ("with", ["softmax", "nystrom-8+skip"])):
        rows = run_efficiency(EfficiencyOptions(**SMALL, skip=skip, passes=("forward",), to=tmp_path / skip))
        assert list(dict.fromkeys(row.method for row in rows)) == methods
        assert {row.quantity for row in rows} == {"forward time", "forward memory"}


def test_memory_is_that_of_the_matrices(tmp_path):
    asked = SMALL | {"lengths": (256,), "methods": ("softmax-materialised", "softmax"), "repeats": 1}
    rows = {(row.method, row.quantity): row.value for row in run_efficiency(EfficiencyOptions(**asked, to=tmp_path))}
    squares = 2 * 2 * 256 * 256 * 4 / 1e6
    assert squares <= rows["softmax-materialised", "forward memory"] < 1.2 * squares
    assert rows["softmax", "forward memory"] < squares / 5
    assert rows["softmax-materialised", "forward+backward memory"] > rows["softmax-materialised", "forward memory"]


def test_methods_take_turns_after_one_warm_up(tmp_path):
    turns = []

    def builder(name):
        def build(inputs, number, skip):
            def forward():
                turns.append(name)
                # A gradient left from the previous call would be accumulated.
                assert all(leaf.grad is None for leaf in inputs.leaves)
                return sum(inputs.leaves)

            return Call(forward, inputs.leaves)

        return build

    both = cells("forward+backward", one=builder("one"), two=builder("two"))
    sweep_lengths((4,), setup(both), tmp_path / "rows.csv")
    assert turns == ["one", "two"] * 5


def test_a_run_continues_where_it_was_interrupted(tmp_path, capsys):
    interrupted = []

    def build(inputs, number, skip):
        if inputs.n == 32 and not interrupted:
            interrupted.append(inputs.n)
            raise KeyboardInterrupt
        return Call(lambda: sum(inputs.leaves), inputs.leaves)

    asked = (16, 32), setup(cells(interrupted=build)), tmp_path / "rows.csv"
    with pytest.raises(KeyboardInterrupt):
        sweep_lengths(*asked)
    assert "rows.csv keeps the lengths that are done" in capsys.readouterr().err
    kept = read_rows(tmp_path / "rows.csv")
    assert {row.n for row in kept} == {16}
    rows = sweep_lengths(*asked)
    assert rows[: len(kept)] == kept
    assert {row.n for row in rows} == {16, 32}


def test_lengths_that_are_done_are_not_measured_again(tmp_path, measured):
    first = run_efficiency(EfficiencyOptions(**SMALL, to=tmp_path))
    assert run_efficiency(EfficiencyOptions(**SMALL, to=tmp_path)) == first
    more = run_efficiency(EfficiencyOptions(**SMALL | {"lengths": (64, 32, 8, 8)}, to=tmp_path))
    assert measured() == [16, 32, 8, 64]
    assert list(dict.fromkeys(row.n for row in more)) == [8, 32, 64]


def test_another_setting_in_the_same_folder_raises(tmp_path, measured):
    run_efficiency(EfficiencyOptions(**SMALL, to=tmp_path))
    before = (tmp_path / "efficiency.csv").read_bytes()
    for change in ({"heads": 4}, {"methods": ("softmax",)}, {"seed": 1}, {"dtype": "float64"}):
        with pytest.raises(ValueError, match=r"efficiency\.csv holds rows of another setting"):
            run_efficiency(EfficiencyOptions(**SMALL | change, to=tmp_path))
        assert (tmp_path / "efficiency.csv").read_bytes() == before
    assert measured() == [16, 32]


def test_the_command_of_a_row_is_the_same_setting(tmp_path, measured):
    rows = run_efficiency(
        EfficiencyOptions(**SMALL, passes=("forward",), limit_seconds=12.5, dtype="float64", threads=1, to=tmp_path)
    )
    words = shlex.split(rows[0].command)
    assert words[:3] == ["nystrom", "bench", "efficiency"]
    assert str(tmp_path) not in rows[0].command
    asked = call(EfficiencyOptions, [*words[3:], "--to", str(tmp_path)], "bench efficiency")
    assert run_efficiency(asked) == rows
    assert measured() == [16, 32]


def test_what_does_not_fit_in_memory_is_not_run(tmp_path, capsys):
    both = cells_of(("softmax-materialised", "softmax"), ("forward",), "both", CPU)
    rows = sweep_lengths((512,), setup(both, free_bytes=lambda device: 2_000_000), tmp_path / "rows.csv")
    left, run = rows[:2], rows[2:]
    for row in left:
        assert math.isnan(row.value)
        assert (row.repeats, row.low, row.high) == (0, None, None)
        assert row.note == "needs about 0.00436 GB, 50% of the free memory is 0.001 GB"
    assert all(row.value > 0 and row.note == "" for row in run)
    assert "n=512: softmax-materialised forward is not measured: needs about" in capsys.readouterr().err


def test_memory_is_estimated_from_the_length_before(tmp_path):
    # Known from the contender at the first length already.
    def build(inputs, number, skip):
        return Call(lambda: torch.empty(inputs.n, 1000).sum() + inputs.leaves[0], inputs.leaves)

    asked = setup(cells("forward", hungry=build), free_bytes=lambda device: 2_000_000)
    rows = sweep_lengths((128, 512), asked, tmp_path / "rows.csv")
    assert [math.isnan(row.value) for row in rows] == [False, False, True, True]


def test_a_call_that_would_take_too_long_is_not_run(tmp_path):
    rows = run_efficiency(
        EfficiencyOptions(**SMALL, passes=("forward",), skip="without", limit_seconds=1e-9, to=tmp_path)
    )
    assert [math.isnan(row.value) for row in rows] == [row.n == 32 for row in rows]
    assert rows[-1].note.startswith("would take about 0 s a call, the limit is 1e-09 s")


def test_a_long_first_length_is_estimated_from_a_short_call(tmp_path, measured):
    both = cells_of(("softmax", "nystrom-8"), ("forward", "forward+backward"), "without", CPU)
    asked = setup(both, probe_tokens=16, limit_seconds=1e-9)
    rows = sweep_lengths((64,), asked, tmp_path / "rows.csv")
    assert measured() == [64]
    # Linear methods are not probed, and have no estimate yet.
    assert {row.method for row in rows if math.isnan(row.value)} == {"softmax"}
    assert {row.n for row in read_rows(tmp_path / "rows.csv")} == {64}
    # Estimates for the next length use the rows of the first.
    sweep_lengths((64, 128), asked, tmp_path / "rows.csv")
    assert measured() == [128]


def test_a_method_that_cannot_run_says_why_and_the_others_continue(tmp_path):
    asked = SMALL | {"lengths": (36,), "methods": ("softmax", "authors-8")}
    rows = run_efficiency(EfficiencyOptions(**asked, skip="without", to=tmp_path))
    notes = {row.method: row.note for row in rows}
    assert notes == {"softmax": "", "authors-8": "needs a length that is a multiple of 8 and longer"}


def test_threads_are_set_for_the_run_alone(tmp_path):
    seen = []

    def build(inputs, number, skip):
        seen.append(torch.get_num_threads())
        return Call(lambda: sum(inputs.leaves), inputs.leaves)

    before = torch.get_num_threads()
    other = 1 if before > 1 else 2
    rows = sweep_lengths((16,), setup(cells(counting=build), threads=other), tmp_path / "rows.csv")
    assert set(seen) == {other}
    assert torch.get_num_threads() == before
    assert rows[0].fact("threads") == str(other)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lengths": ()}, "lengths is empty"),
        ({"lengths": (512, 0)}, "an entry of lengths is 0"),
        ({"passes": ()}, "passes is empty"),
        ({"methods": ("softmaxx",)}, "method 'softmaxx' is unknown"),
        ({"repeats": 0}, "repeats is 0"),
        ({"batch": 0}, "batch is 0"),
        ({"heads": 0}, "heads is 0"),
        ({"width": 0}, "width is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"threads": 0}, "threads is 0"),
        ({"kernel_size": 4}, "kernel_size is 4"),
        ({"limit_seconds": 0.0}, "limit_seconds is 0.0"),
        ({"passes": ("back",)}, "passes is 'back'; expected one of"),
        ({"launches": ()}, "launches is empty"),
        ({"launches": ("jit",)}, "an entry of launches is 'jit'"),
        ({"launches": ("eager", "graph")}, "launches holds 'graph', a CUDA graph, but device is 'cpu'"),
        ({"skip": "never"}, "skip is 'never'; expected one of"),
        ({"dtype": "int8"}, "dtype is 'int8'; expected one of"),
        ({"layout": "rows"}, "layout is 'rows'; expected one of"),
        ({"device": "gpu"}, "device is 'gpu'"),
        ({"device": "meta"}, "device is 'meta', whose memory cannot be measured"),
        ({"device": "cuda:99"}, "device is 'cuda:99', but torch finds .* CUDA devices here"),
    ],
)
def test_what_cannot_be_measured_raises_before_any_measurement(tmp_path, change, message, measured):
    with pytest.raises(ValueError, match=message):
        run_efficiency(EfficiencyOptions(**SMALL | change, to=tmp_path / "new"))
    assert measured() == []
    assert not (tmp_path / "new").exists()


def test_a_folder_that_cannot_be_written_raises_before_any_measurement(tmp_path, measured):
    (tmp_path / "taken").touch()
    with pytest.raises(ValueError, match=r"taken.* cannot be written"):
        run_efficiency(EfficiencyOptions(**SMALL, to=tmp_path / "taken"))
    assert measured() == []


def test_other_dtypes_run(tmp_path):
    for dtype in ("float64", "bfloat16", "float16"):
        rows = run_efficiency(
            EfficiencyOptions(**SMALL | {"lengths": (16,)}, dtype=dtype, layout="heads", to=tmp_path / dtype)
        )
        assert {(row.dtype, row.note) for row in rows} == {(dtype, "")}


def test_each_length_has_a_floor_where_memory_bounds(tmp_path, measured):
    softmax = cells_of(("softmax",), ("forward", "forward+backward"), "both", CPU)
    bounded = setup(softmax, dtype="bfloat16", bandwidth=lambda device: (4e9, 2e9, 8e9))
    rows = sweep_lengths((16, 32), bounded, tmp_path / "rows.csv")
    floors = {(row.quantity, row.n): row for row in rows if row.method == "floor"}
    assert len(floors) == 3 * 2
    for n in (16, 32):
        size = 1 * 2 * n * 8 * 2
        for timed, passes in (("forward", 6), ("forward+backward", 17)):
            row = floors[f"{timed} time", n]
            expected = [1e3 * passes * size / bandwidth for bandwidth in (4e9, 8e9, 2e9)]
            assert [row.value, row.low, row.high] == pytest.approx(expected)
        assert floors["copy bandwidth", n].value == 4.0
    # They are part of the setting: the run continues with them, and without them it is another.
    assert sweep_lengths((16, 32), bounded, tmp_path / "rows.csv") == rows
    assert measured() == [16, 32]
    with pytest.raises(ValueError, match="another setting: methods at n=16"):
        sweep_lengths((16, 32), setup(softmax, dtype="bfloat16"), tmp_path / "rows.csv")


def test_rows_say_what_the_allocator_was_told(tmp_path, monkeypatch):
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "8589934592")
    rows = run_efficiency(EfficiencyOptions(**SMALL | {"lengths": (16,), "repeats": 1}, to=tmp_path))
    assert {row.fact("allocator") for row in rows} == {"MALLOC_TRIM_THRESHOLD_=8589934592"}


@pytest.mark.long
def test_rows_say_when_kernels_were_interpreted(tmp_path):
    asked = SMALL | {"lengths": (16,), "methods": ("softmax", "nystrom-triton-8"), "repeats": 1}
    rows = run_efficiency(EfficiencyOptions(**asked, skip="with", to=tmp_path))
    assert {row.method for row in rows} == {"softmax", "nystrom-triton-8+skip"}
    assert all((row.fact("triton"), row.note) == ("interpreted", "") for row in rows)


@pytest.mark.long
def test_compiled_methods_run_at_more_lengths_than_a_function_may_have_graphs(tmp_path, monkeypatch):
    lengths = tuple(range(20, 20 + torch._dynamo.config.recompile_limit + 1))
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    compiled = cells_of(("nystrom-4",), ("forward",), "without", CPU, launches=("compiled",))
    rows = sweep_lengths(lengths, setup(compiled, repeats=1), tmp_path / "rows.csv")
    assert {(row.method, row.note) for row in rows} == {("nystrom-4, compiled", "")}


@pytest.mark.slow
def test_compiled_methods_run_by_the_compiler_itself(tmp_path):
    asked = SMALL | {"methods": ("nystrom-4",), "repeats": 1, "launches": ("eager", "compiled")}
    rows = run_efficiency(EfficiencyOptions(**asked, skip="without", to=tmp_path))
    assert {(row.method, row.note) for row in rows} == {("nystrom-4", ""), ("nystrom-4, compiled", "")}


def test_an_error_of_triton_is_noted_and_any_other_is_raised(tmp_path):
    out_of_resources = pytest.importorskip("triton.runtime.errors").OutOfResources

    def fails_with(error):
        def build(inputs, number, skip):
            raise error

        return build

    large = cells(large=fails_with(out_of_resources(2, 1, "shared memory")))
    softmax = cells_of(("softmax",), ("forward",), "without", CPU)
    rows = sweep_lengths((16,), setup(large + softmax), tmp_path / "rows.csv")
    assert {row.method: row.note[:41] for row in rows} == {
        "large": "out of resource: shared memory, Required:",
        "softmax": "",
    }
    with pytest.raises(KeyError):
        sweep_lengths((16,), setup(cells(wrong=fails_with(KeyError("x")))), tmp_path / "other.csv")


@pytest.mark.gpu
def test_it_runs_on_a_gpu(tmp_path):
    asked = SMALL | {"lengths": (1024,), "methods": (), "launches": ("eager", "graph")}
    rows = run_efficiency(EfficiencyOptions(**asked, device="cuda", to=tmp_path))
    kernels = ("nystrom-triton-64", "nystrom-triton-64+skip", "near_far-triton", "skyformer-triton-128")
    for name in (*kernels, *(f"{name}, graph" for name in kernels), "floor"):
        assert all(row.value > 0 for row in rows if row.method == name), name
        assert any(row.method == name for row in rows), name
    assert all(" triton=" in row.words for row in rows)
    assert all(row.value > 0 for row in rows if row.method in ("softmax", "nystrom-64", "nystrom-64+skip"))
    assert {row.device for row in rows} == {torch.cuda.get_device_name(0)}


def test_every_option_reaches_the_command(tmp_path):
    # A folder could mix settings that neither of them shows.
    asked = set(inspect.signature(EfficiencyOptions).parameters) - {"lengths", "to"}
    given = dict.fromkeys(asked, "other") | {"lengths": (1, 2), "to": tmp_path}
    command = command_line(("nystrom", "bench"), EfficiencyOptions, given, "lengths")
    assert all(f"--{name.replace('_', '-')} other" in command for name in asked)
    assert command.endswith("--lengths 1 2")


@pytest.mark.long
def test_other_processes_work_beside_and_end(tmp_path, monkeypatch):
    started, start = [], subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *words, **how: started.append(start(*words, **how)) or started[-1])
    rows = run_efficiency(EfficiencyOptions(**{**SMALL, "lengths": (16,), "beside": 1, "to": tmp_path}))
    assert {row.facts["beside"] for row in rows} == {"1"}
    assert "--beside 1" in rows[0].command
    (beside,) = (process for process in started if "x @ x" in str(process.args))
    assert beside.poll() is not None
    with pytest.raises(ValueError, match="beside is -1"):
        EfficiencyOptions(beside=-1)
