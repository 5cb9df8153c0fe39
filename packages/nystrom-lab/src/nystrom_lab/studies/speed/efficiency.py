"""Time and peak memory of attention by number of tokens: Table 1 of the Nyströmformer paper, on this machine.

Each method is measured forward and forward+backward, for the attention alone and with its skip ("nystrom-64+skip"), all
of them interleaved: see `nystrom_lab.studies.speed.interleaved`. Each length, method and pass has two rows:

- "forward time" or "forward+backward time": the median in ms, `low` and `high` being the quartiles;
- "forward memory" or "forward+backward memory": the peak beyond the inputs, in MB of 10^6 bytes, from a
  separate call; `nystrom.clock` says what it includes.

On a CUDA device each length also has rows of the method "floor": the bandwidth of a copy, and the time that it takes at
this bandwidth to move the bytes that must be moved, see `nystrom_lab.studies.speed.floor`. Tables then show each time
as a multiple of it, and how much memory a method takes beyond its inputs and results.

A call that would not fit in half of the free memory, or would exceed the time limit, is skipped: its rows hold NaN and
a note with the estimate.

Source: Xiong et al. (2021), arXiv:2102.03902, Table 1.
Departs from the paper: medians of interleaved calls instead of averages; the fused softmax, the authors' formula and
other packages are measured in addition to the materialised softmax.
"""

from pathlib import Path
from typing import get_args

from nystrom.checks import check_at_least, check_choice
from nystrom.whole_files import check_folder
from nystrom_lab.measure.rows import Row
from nystrom_lab.studies.speed.asked import check_measured, command_line, device_name, find_device
from nystrom_lab.studies.speed.choices import Dtype, Layout, Pass, Skip


def run_efficiency(
    *,
    lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384),
    methods: tuple[str, ...] = (),
    passes: tuple[Pass, ...] = ("forward", "forward+backward"),
    skip: Skip = "both",
    batch: int = 1,
    heads: int = 8,
    width: int = 64,
    kernel_size: int = 33,
    dtype: Dtype = "float32",
    device: str = "cpu",
    layout: Layout = "tokens",
    repeats: int = 7,
    seed: int = 0,
    threads: int | None = None,
    limit_seconds: float = 60.0,
    to: Path = Path("runs/efficiency"),
) -> list[Row]:
    """Measure time and peak memory of attention methods side by side, over the number of tokens.

    Rows go to efficiency.csv in the folder, a length at a time. The same command continues an interrupted run and
    skips the lengths that are done.

    Args:
        lengths: Numbers of tokens n, in any order.
        methods: Such as softmax-materialised, softmax, nystrom-64, kernelized, skyformer-128, transformers-64,
            nystrom-attention-64, and authors-64, the published formula. Ratios are taken against the first.
            By default all of these and nystrom-32, other packages only if they are installed; on a GPU also
            nystrom-triton-64, near_far-triton and skyformer-triton-128, by Triton kernels, and nystrom-compiled-64.
        passes: Passes to measure.
        skip: Whether to measure methods with a skip convolution without it, with it, or both.
        batch: Sequences b.
        heads: Heads h.
        width: Width d of one head.
        kernel_size: Odd size of the skip convolution.
        dtype: Dtype of inputs and weights.
        device: cpu, cuda or cuda:1.
        layout: "tokens" is (b, n, h*d) in and out, as projections produce them; "heads" is contiguous (b, h, n, d).
        repeats: Timed calls of each method.
        seed: Seed of the random inputs.
        threads: CPU threads; None keeps torch's setting.
        limit_seconds: Skip calls that would take longer.
        to: Folder of the results.

    Raises:
        ValueError: An unknown, missing or out-of-range argument, or a folder that holds another setting.
    """
    asked = dict(locals())
    check_measured(asked)
    check_choice("layout", layout, get_args(Layout))
    for name in ("heads", "width"):
        check_at_least(name, asked[name], 1)
    import torch

    from nystrom_lab.studies.speed.contenders.inputs import Sizes
    from nystrom_lab.studies.speed.contenders.table import available, find_contender
    from nystrom_lab.studies.speed.floor import copy_bandwidth
    from nystrom_lab.studies.speed.interleaved import Setup
    from nystrom_lab.studies.speed.sweep import cells_of, sweep_lengths, triton_version

    place = find_device(device)
    setup = Setup(
        cells=cells_of(methods or available(place.type), passes, skip, place),
        sizes=Sizes(batch, heads, width, kernel_size, getattr(torch, dtype), place, layout),
        dtype=dtype,
        repeats=repeats,
        seed=seed,
        threads=torch.get_num_threads() if threads is None else threads,
        limit_seconds=limit_seconds,
        device=device_name(place),
        command=command_line(("nystrom", "bench", "efficiency"), run_efficiency, asked, "lengths"),
        bandwidth=copy_bandwidth if place.type == "cuda" else None,
        triton=triton_version(place, any(find_contender(name)[0].kernels for name in methods)),
    )
    check_folder(to)
    return sweep_lengths(lengths, setup, to / "efficiency.csv")
