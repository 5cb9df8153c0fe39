"""Time and peak memory of attention by number of tokens: Table 1 of the Nyströmformer paper, on this machine.

Each method is measured forward and forward+backward, for the attention alone and with its skip ("nystrom-64+skip"), all
of them in turn: see `nystrom_papers.bench.by_length`. Quantities are "forward time", "forward memory" and so on; memory
is the peak beyond the inputs.

On a CUDA device each length also has rows of the method "floor": the bandwidth of a copy, and the time that it takes at
this bandwidth to move the bytes that must be moved, see `nystrom_papers.bench.floor`. Tables then show each time as a
multiple of it, and how much memory a method takes beyond its inputs and results.

Source: Xiong et al. (2021), arXiv:2102.03902, Table 1.
Departs from the paper: medians of interleaved calls instead of averages; the fused softmax, the authors' formula and
other packages are measured in addition to the materialised softmax.
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from nystrom.checks import check_at_least, check_choice
from nystrom.whole_files import check_folder
from nystrom_lab.measure.rows import Row
from nystrom_papers.bench.options import Layout, LengthOptions, command_line, find_device


@dataclass(frozen=True, kw_only=True)
class EfficiencyOptions(LengthOptions):
    """Measure time and peak memory of attention methods side by side, over the number of tokens.

    Rows go to efficiency.csv in the folder, a length at a time. The same command continues an interrupted run and
    skips the lengths that are done.

    Attributes:
        methods: Such as softmax-materialised, softmax, nystrom-64, kernelized, skyformer-128, transformers-64,
            nystrom-attention-64, and authors-64, the published formula. Ratios are taken against the first.
            By default all of these and nystrom-32, other packages only if they are installed; on a GPU also
            nystrom-triton-64, near_far-triton and skyformer-triton-128, by Triton kernels.
        heads: Heads h.
        width: Width d of one head.
        beside: Processes that multiply matrices on all cores meanwhile, as on a shared machine.
        layout: "tokens" is (b, n, h*d) in and out, as projections produce them; "heads" is contiguous (b, h, n, d).
        to: Folder of the results.
    """

    lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384)
    methods: tuple[str, ...] = ()
    heads: int = 8
    width: int = 64
    beside: int = 0
    layout: Layout = "tokens"
    to: Path = Path("runs/efficiency")

    def __post_init__(self):
        super().__post_init__()
        check_choice("layout", self.layout, get_args(Layout))
        for name in ("heads", "width"):
            check_at_least(name, getattr(self, name), 1)
        check_at_least("beside", self.beside, 0)


@contextmanager
def _others(number: int) -> Iterator[None]:
    """Run so many processes that multiply matrices."""
    # Until the bench ends, however that happens.
    load = "import os, torch\nx, bench = torch.randn(1500, 1500), os.getppid()\nprint(flush=True)\n"
    load += "while os.getppid() == bench: x @ x"
    words = [sys.executable, "-c", load]
    with ExitStack() as running:
        for _ in range(number):
            process = running.enter_context(subprocess.Popen(words, stdout=subprocess.PIPE))
            running.callback(process.kill)
            assert process.stdout is not None
            process.stdout.readline()
        yield


def run_efficiency(options: EfficiencyOptions) -> list[Row]:
    """Measure the rows of `EfficiencyOptions`.

    Raises:
        ValueError: An unknown, missing or out-of-range argument, or a folder that holds another setting.
    """
    import torch

    from nystrom_papers.bench.by_length import cells_of, length_setup, sweep_lengths, triton_version
    from nystrom_papers.bench.contenders import available, find_contender
    from nystrom_papers.bench.floor import copy_bandwidth
    from nystrom_papers.bench.inputs import Sizes

    place = find_device(options.device)
    sizes = Sizes(
        options.batch, options.heads, options.width, options.kernel_size, getattr(torch, options.dtype), place,
        options.layout,
    )  # fmt: skip
    setup = length_setup(
        options,
        "efficiency",
        cells=cells_of(
            options.methods or available(place.type), options.passes, options.skip, place, launches=options.launches
        ),
        sizes=sizes,
        shape={
            "b": sizes.batch, "h": sizes.heads, "d": sizes.width, "kernel": sizes.kernel_size, "layout": sizes.layout,
            **({"beside": options.beside} if options.beside else {}),
        },
        command=command_line(("nystrom", "bench", "efficiency"), EfficiencyOptions, vars(options), "lengths"),
        triton=triton_version(place, any(find_contender(name)[0].kernels for name in options.methods)),
        bandwidth=copy_bandwidth if place.type == "cuda" else None,
    )  # fmt: skip
    check_folder(options.to)
    with _others(options.beside):
        return sweep_lengths(options.lengths, setup, options.to / "efficiency.csv")
