"""Time a whole encoder, forward and a training step, and tell what of it is not attention.

    python tools/encoder_parts.py --to runs/encoder-parts.csv
    python tools/encoder_parts.py --to runs/minilm-parts.csv --model MODEL

Without MODEL the encoder has 4 layers of width 256 with 4 heads; MODEL is a folder of BERT's kind, whose sizes are
taken, as `attn_implementation` serves it, without dropout of attention weights; weights are random, and its table of
positions has the length that is measured. The input is one sequence, whose last tenth is padding. Methods are exact
attention in one fused call, `nystrom-64` and `near_far` with the sizes of `near_far_sizes(n)`.

Rows hold the time of a call, the median of the repeats with its quartiles, all methods in turn; and shares of the
operators' time, by torch's profiler, in three further calls:

    attention      the method: what is between projected queries, keys and values, and its output
    linear         matrix products with weights, and their biases
    norm           layer norms
    elementwise    activations, sums of residuals, dropout, embeddings, the loss
    around         what the model adds: masks, copies, changes of shape and dtype

Operators of a backward pass count as those of the forward pass that they belong to.
"""

import argparse
import functools
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import AttentionInterface, AutoConfig, AutoModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import nystrom.integrations  # noqa: F401 (the methods get their names in transformers)
from nystrom import near_far_sizes
from nystrom.models import EncoderConfig, EncoderModel, blocks
from nystrom_lab.measure.memory import allocator
from nystrom_lab.measure.rows import append_rows, cpu_name, new_row

LENGTHS = (512, 2048, 8192, 16384)
PARTS = ("attention", "linear", "norm", "elementwise", "around")
METHODS = ("softmax", "nystrom-64", "near_far")
# Operators that move numbers or say which count, and compute nothing.
MOVES = (
    "copy", "clone", "contiguous", "to", "view", "reshape", "transpose", "permute", "expand", "slice", "select", "cat",
    "fill", "masked", "where", "bitwise", "eq", "ne", "ge", "gt", "logical", "zero", "zeros", "empty", "ones", "arange",
    "unsqueeze", "squeeze", "as", "t", "detach", "narrow", "pad", "constant", "any", "all", "is", "item", "local",
    "flatten", "unflatten", "split", "stack", "index", "resize", "lift", "scalar", "full", "cumsum", "rsub", "result",
)  # fmt: skip


def marked(part: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """The same call, under the name of a part."""

    @functools.wraps(call)
    def named(*args: Any, **kwargs: Any) -> Any:
        with record_function(f"part:{part}"):
            return call(*args, **kwargs)

    return named


def build(name: str, n: int, model: Path | None) -> nn.Module:
    """An encoder with random weights, its parts under their names."""
    method, _, number = name.partition("-")
    options: dict[str, Any] = {"num_landmarks": int(number)} if number else {}
    if method == "near_far":
        options = near_far_sizes(n)
    torch.manual_seed(0)
    if model is None:
        made: Any = EncoderModel(
            EncoderConfig(
                hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024,
                max_position_embeddings=n, attention=method, attention_options=options, conv_kernel_size=None,
            )
        )  # fmt: skip
    else:
        # Exact attention drops its weights, which no fused call does on a CPU, and the other methods have none.
        config = AutoConfig.from_pretrained(
            model, max_position_embeddings=n, attention_options=options, attention_probs_dropout_prob=0.0
        )
        made = AutoModel.from_config(config, attn_implementation="sdpa" if method == "softmax" else method)
    for module in made.modules():
        part = {nn.Linear: "linear", nn.LayerNorm: "norm"}.get(type(module))
        if part is not None:
            module.forward = marked(part, module.forward)
    return made


def shares(call: Callable[[], object]) -> dict[str, float]:
    """The share of each part in the time of all operators of three calls."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        for _ in range(3):
            call()
    events = found.events() or []

    def part_above(event: Any) -> str | None:
        while event is not None:
            if event.name.startswith("part:"):
                return event.name.removeprefix("part:")
            event = event.cpu_parent
        return None

    def backward_above(event: Any) -> Any:
        while event is not None and not event.name.startswith("autograd::engine::evaluate_function"):
            event = event.cpu_parent
        return event

    parts = {e.sequence_nr: part_above(e) for e in events if e.sequence_nr >= 0 and backward_above(e) is None}
    spent: Counter[str] = Counter()
    for event in events:
        if event.name.startswith("part:") and event.name != "part:attention":
            continue
        backward = backward_above(event)
        part = part_above(event) if backward is None else parts.get(backward.sequence_nr)
        if part is None and backward is not None and "Embedding" in backward.name:
            # A gradient of the whole table.
            part = "elementwise"
        if part is None:
            word = event.name.partition("::")[2].strip("_").partition("_")[0]
            part = "around" if event.name.startswith("aten::") and word in MOVES else "elementwise"
        spent[part] += event.self_cpu_time_total
    total = sum(spent.values())
    return {part: spent[part] / total for part in PARTS}


def main() -> None:
    """Measure, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--limit-seconds", type=float, default=15.0)
    asked = parser.parse_args()
    if asked.to.exists():
        parser.error(f"{asked.to} exists: name another file in --to.")
    torch.set_num_threads(asked.threads)
    blocks.attend_in_heads = marked("attention", blocks.attend_in_heads)
    for name in ("sdpa", "nystrom", "near_far"):
        AttentionInterface.register(name, marked("attention", ALL_ATTENTION_FUNCTIONS[name]))
    kind = "4 x 256" if asked.model is None else asked.model.name
    command = f"python tools/encoder_parts.py{'' if asked.model is None else f' --model {asked.model.name}'}"
    command += f" --repeats {asked.repeats} --threads {asked.threads}"
    for n in asked.lengths:
        ids = torch.randint(1000, (1, n), generator=torch.Generator().manual_seed(0))
        keep = torch.ones_like(ids)
        keep[:, n - n // 10 :] = 0
        models = {name: build(name, n, asked.model) for name in METHODS}

        def forward(model: nn.Module, ids: Tensor = ids, keep: Tensor = keep) -> None:
            with torch.no_grad():
                model.eval()(input_ids=ids, attention_mask=keep)

        def step(model: nn.Module, ids: Tensor = ids, keep: Tensor = keep) -> None:
            model.zero_grad()
            model.train()(input_ids=ids, attention_mask=keep).last_hidden_state.square().mean().backward()

        for what, call in (("forward", forward), ("forward+backward", step)):
            times: dict[str, list[float]] = {}
            for turn in range(asked.repeats + 1):
                for name, model in models.items():
                    if turn and max(times[name]) > asked.limit_seconds:
                        continue
                    start = time.perf_counter()
                    call(model)
                    times.setdefault(name, []).append(time.perf_counter() - start)
            for name, model in models.items():
                shared: dict[str, Any] = {
                    "study": "encoder parts", "method": name, "n": n, "device": cpu_name(), "seed": 0,
                    "command": command,
                    "facts": {"model": kind, "b": 1, "threads": asked.threads, "allocator": allocator()},
                }  # fmt: skip
                if len(times[name]) < 3:
                    note = f"a call takes {times[name][0]:.0f} s, the limit is {asked.limit_seconds:.0f}"
                    row = new_row(quantity=f"{what} time", value=math.nan, unit="ms", note=note, **shared)
                    append_rows(asked.to, [row])
                    print(f"n={n:5} {name:10} {what:16} is not measured: {note}", flush=True)
                    continue
                low, middle, high = statistics.quantiles(times[name][1:], n=4, method="inclusive")
                found = shares(functools.partial(call, model))
                time_row = new_row(
                    quantity=f"{what} time", value=1e3 * middle, low=1e3 * low, high=1e3 * high, unit="ms",
                    repeats=asked.repeats, **shared,
                )  # fmt: skip
                rows = [new_row(quantity=f"{what}, {part}", value=found[part], unit="", **shared) for part in PARTS]
                append_rows(asked.to, [time_row, *rows])
                told = ", ".join(f"{part} {share:.1%}" for part, share in found.items())
                print(f"n={n:5} {name:10} {what:16} {1e3 * middle:7.0f} ms: {told}", flush=True)


if __name__ == "__main__":
    main()
