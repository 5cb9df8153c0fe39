"""CUDA graphs of measured calls: in what order they are recorded, and on a GPU what they replay."""

from contextlib import contextmanager

import pytest
import torch

from nystrom_papers.bench.by_length import cells_of, length_setup, sweep_lengths
from nystrom_papers.bench.efficiency import EfficiencyOptions
from nystrom_papers.bench.inputs import Sizes, make_inputs
from nystrom_papers.bench.launches import Recorder

DEVICE = torch.device("cuda", 0)


@pytest.fixture
def did(monkeypatch):
    """The calls to a GPU that is not there, in order; captures run once more when they are replayed."""
    done = []

    class Stream:
        def __init__(self, device):
            self.device = device

        def wait_stream(self, other):
            done.append(f"waits for {other}")

    class Graph:
        def replay(self):
            done.append("replay")

    @contextmanager
    def within(what):
        done.append(f"in {what}")
        try:
            yield
        finally:
            done.append(f"out of {what}")

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the current stream")
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: within("the stream"))
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, pool, stream: within("a capture"))
    return done


def test_a_step_is_warmed_up_and_recorded_on_one_stream_and_writes_gradients_anew(did):
    replay = Recorder(DEVICE).record(lambda: did.append("step"), lambda: did.append("clear"))
    recorded = [
        *("waits for the current stream", "in the stream", "clear", "step", "clear"),
        *("in a capture", "step", "out of a capture", "clear", "out of the stream"),
    ]
    assert did == recorded
    replay()
    assert did == [*recorded, "replay"]


def test_a_capture_that_fails_leaves_the_stream(did):
    def step():
        if did[-1] == "in a capture":
            raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="capturing"):
        Recorder(DEVICE).record(step, lambda: None)
    assert did[-1] == "out of the stream"


def test_what_is_timed_is_the_replay_and_what_fails_is_noted(did, tmp_path, monkeypatch):
    """With a device that only claims to have graphs."""
    cpu = torch.device("cpu")
    found = cells_of(("softmax", "linear"), ("forward", "forward+backward"), "without", DEVICE, launches=("graph",))
    sizes = Sizes(1, 2, 8, 3, torch.float32, cpu, "tokens")
    asked = EfficiencyOptions(repeats=3)
    setup = length_setup(asked, "efficiency", cells=found, sizes=sizes, shape={}, command="")
    rows = sweep_lengths((16,), setup, tmp_path / "rows.csv")
    assert {(row.method, row.note) for row in rows} == {("softmax, graph", ""), ("linear, graph", "")}
    assert did.count("replay") == 3 * len(found)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, pool, stream: fails())
    rows = sweep_lengths((16,), setup, tmp_path / "other.csv")
    assert {row.note for row in rows} == {"a capture failed"}


def fails():
    raise RuntimeError("a capture failed")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["softmax", "nystrom-triton-64", "near_far-triton", "near_far-growing-triton"])
def test_a_graph_gives_the_bits_of_the_call_beside_another_graph(name):
    sizes = Sizes(2, 4, 64, 33, torch.bfloat16, DEVICE, "tokens")
    inputs, recorder = make_inputs(2048, sizes, 0), Recorder(DEVICE)
    (cell,) = cells_of((name,), ("forward",), "without", DEVICE)
    call = cell.contender.build(inputs, cell.number, skip=False)
    kept = []

    def step():
        with torch.no_grad():
            kept.append(call.forward())

    step()
    replay = recorder.record(step, lambda: None)
    recorder.record(step, lambda: None)()
    replay()
    torch.cuda.synchronize()
    assert torch.equal(kept[0], kept[2])
