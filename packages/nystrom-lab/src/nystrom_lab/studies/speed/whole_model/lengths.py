"""Time and peak memory of a whole encoder over the number of tokens, with exact attention and with other methods.

The Nyströmformer paper reports "significant speedups" over BERT (section 1), and measures one attention module (section
5, Table 1). A model also has projections, feed-forward blocks and embeddings, which cost the same with every method.
Its ratio is therefore nearer to one than that of the attention alone, the more so the shorter the text and the wider
the model.

Each method is measured forward and forward+backward, at the sizes of BERT-base or of a given model, all of them
interleaved: see `nystrom_lab.studies.speed.interleaved`. Each length, method and pass has two rows:

- "forward time" or "forward+backward time": the median in ms, `low` and `high` being the quartiles;
- "forward memory" or "forward+backward memory": the peak beyond weights and inputs, in MB of 10^6 bytes, from a
  separate call; gradients of the weights are part of it; see `nystrom.clock`.

A call that would not fit in half of the free memory, or would exceed the time limit, is skipped: its rows hold NaN and
a note with the estimate.

Source: Xiong et al. (2021), arXiv:2102.03902, sections 1 and 5.
"""

from dataclasses import asdict
from pathlib import Path

from nystrom.whole_files import check_folder
from nystrom_lab.measure.rows import Row
from nystrom_lab.studies.speed.asked import check_measured, command_line, device_name, find_device
from nystrom_lab.studies.speed.choices import Dtype, Pass, Skip
from nystrom_lab.studies.speed.whole_model.sizes import find_sizes


def run_model(
    *,
    lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192),
    methods: tuple[str, ...] = ("softmax", "nystrom-64"),
    passes: tuple[Pass, ...] = ("forward", "forward+backward"),
    skip: Skip = "with",
    model: Path | None = None,
    layers: int | None = None,
    width: int | None = None,
    heads: int | None = None,
    intermediate: int | None = None,
    batch: int = 1,
    kernel_size: int = 33,
    dtype: Dtype = "float32",
    device: str = "cpu",
    repeats: int = 5,
    seed: int = 0,
    threads: int | None = None,
    limit_seconds: float = 300.0,
    to: Path = Path("runs/model"),
) -> list[Row]:
    """Measure time and peak memory of a whole encoder with each attention side by side, over the number of tokens.

    The encoder has BERT-base's sizes and random weights. On two cores, take --layers 2: the ratios of time hardly
    change, since all layers cost the same. Rows go to model.csv in the folder, a length at a time. The same command
    continues an interrupted run and skips the lengths that are done.

    Args:
        lengths: Numbers of tokens n, in any order.
        methods: Methods of this library with their number, such as softmax, nystrom-64, linformer-256; softmax is exact
            attention in one fused call. Ratios are taken against the first.
        passes: Passes to measure.
        skip: Whether methods that have a skip convolution are measured without it, with it, or both.
        model: Folder of an encoder whose sizes are taken, from its config.json; its weights are not needed.
        layers: Layers; those of the model, or 12, if not given.
        width: Width of a token; the model's, or 768.
        heads: Heads; the model's, or 12.
        intermediate: Width inside the feed-forward block; the model's, or 3072.
        batch: Sequences.
        kernel_size: Odd size of the skip convolution.
        dtype: Dtype of weights and activations.
        device: cpu, cuda or cuda:1.
        repeats: Timed calls of each method.
        seed: Seed of the weights and the tokens.
        threads: CPU threads; None keeps torch's setting.
        limit_seconds: Skip calls that would take longer.
        to: Folder of the results.

    Raises:
        ValueError: An unknown, missing or out-of-range argument, or a folder that holds another setting.
    """
    asked = dict(locals())
    check_measured(asked)
    sizes = find_sizes(model, layers=layers, width=width, heads=heads, intermediate=intermediate)
    import torch

    from nystrom_lab.studies.speed.contenders.inputs import Sizes
    from nystrom_lab.studies.speed.interleaved import Setup
    from nystrom_lab.studies.speed.sweep import cells_of, sweep_lengths
    from nystrom_lab.studies.speed.whole_model.contenders import encoder_finder

    place, head_width = find_device(device), sizes.width // sizes.heads
    # Rows name a model without the machine's folders.
    named = asked | {"model": None if model is None else Path(model.name)}
    threads = torch.get_num_threads() if threads is None else threads
    setup = Setup(
        cells=cells_of(methods, passes, skip, place, encoder_finder(sizes, seed)),
        sizes=Sizes(
            batch, sizes.heads, sizes.width // sizes.heads, kernel_size, getattr(torch, dtype), place, "tokens"
        ),
        dtype=dtype,
        repeats=repeats,
        seed=seed,
        threads=threads,
        limit_seconds=limit_seconds,
        device=device_name(place),
        command=command_line(("nystrom", "bench", "model"), run_model, named, "lengths"),
        study="model",
        shape={"b": batch, **asdict(sizes), "kernel": kernel_size},
    )
    check_folder(to)
    return sweep_lengths(lengths, setup, to / "model.csv")
