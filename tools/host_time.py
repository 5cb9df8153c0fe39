"""Host time of calls of the kernels, without a GPU: `python tools/host_time.py`.

Kernels are compiled for compute capability 9.0 and not run, so what is timed is everything else that a call does on the
CPU: checks, the key of its program, memory, and launches up to the driver. Prints a line for each method and pass:

    nystrom forward 52 us
    nystrom training 231 us

Medians of the processor's time of interleaved calls on one thread, in bfloat16, without a mask. The few operators of
torch between the kernels do run on the CPU here; the tensors are small so that they take about the time of a launch.
"""

import argparse
import functools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

os.environ["TRITON_INTERPRET"] = "0"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from nystrom import near_far_attention, nystrom_attention, skyformer_attention
from nystrom.gpu import launch
from nystrom.interleaved_timing import in_turns
from tools.kernel_accounting.analysis import SHARED_MEMORY
from tools.kernel_accounting.driver import OfflineDriver, Shape

_CAPABILITY, _MULTIPROCESSORS, _TOKENS, _HEADS, _WIDTH, _TAPS = "9.0", 132, 640, 2, 64, 33
_METHODS: dict[str, Callable[..., torch.Tensor]] = {
    "nystrom": functools.partial(nystrom_attention, num_landmarks=64),
    "nystrom-skip": functools.partial(nystrom_attention, num_landmarks=64),
    "skyformer": functools.partial(skyformer_attention, num_landmarks=128),
    "near_far": functools.partial(near_far_attention, exact_up_to=0),
}


def main(words: Sequence[str] | None = None) -> None:
    """Print the host times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=200, help="calls of each method and pass")
    repeats = parser.parse_args(words).repeats
    if repeats < 1:
        raise SystemExit(f"--repeats is {repeats}; expected at least 1.")
    torch.set_num_threads(1)
    for name, seconds in host_times(repeats).items():
        print(f"{name} {statistics.median(seconds) * 1e6:.0f} us")


def host_times(repeats: int) -> dict[str, list[float]]:
    """Seconds of each call, by method and pass, taken in turns."""
    calls = {f"{name} {way}": call for name in _METHODS for way, call in _calls(name).items()}
    with _compiled_only():
        return in_turns({name: functools.partial(_seconds, call) for name, call in calls.items()}, repeats)


def _seconds(call: Callable[[], object]) -> float:
    start = time.thread_time()
    call()
    return time.thread_time() - start


def _calls(name: str) -> dict[str, Callable[[], object]]:
    shape = (1, _TOKENS, _HEADS, _WIDTH)
    q, k, v, grad = (torch.zeros(shape, dtype=torch.bfloat16).transpose(1, 2) for _ in range(4))
    more = {"skip": torch.zeros(_HEADS, 1, _TAPS, 1, dtype=torch.bfloat16)} if name.endswith("skip") else {}
    attend = functools.partial(_METHODS[name], backend="triton", **more)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]

    def forward() -> None:
        with torch.no_grad():
            attend(q, k, v)

    def training() -> None:
        torch.autograd.grad(attend(*leaves), leaves, grad)

    return {"forward": forward, "forward-with-gradients": lambda: attend(*leaves), "training": training}


@contextmanager
def _compiled_only() -> Iterator[None]:
    """Compile what is launched, and launch nothing."""
    driver = OfflineDriver(_CAPABILITY, Shape(1, _HEADS, _TOKENS, _WIDTH, 64, torch.bfloat16))
    driver.launcher_cls = lambda source, metadata: lambda *launched: None  # pyright: ignore[reportAttributeAccessIssue]
    with (
        driver.active(),
        mock.patch.object(launch, "check_device", _returning(None)),
        mock.patch.object(launch, "multiprocessors", _returning(_MULTIPROCESSORS)),
        mock.patch.object(launch, "shared_memory", _returning(SHARED_MEMORY[_CAPABILITY])),
    ):
        yield


def _returning(value: object) -> Callable[[object], object]:
    """A function that takes about the time of the cached one that it stands for; a mock takes microseconds."""
    return lambda device: value


if __name__ == "__main__":
    main()
