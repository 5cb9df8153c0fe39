"""The error of approximated attention in a small encoder of T5's kind, trained here, whose heads use their biases.

An encoder of 4 layers and 4 heads of 32 learns to fill in masked bytes of a text, 8 pieces of 256 bytes a step. Then
queries, keys, values and biases of bytes that it has not seen, more at a time than it was trained on, go through

- `near_far`: the bias of far keys by side, as the library has it; the same with no bias for far keys; and with none;
- `nystrom`: softmax with the mean bias of segments in its three matrices; and with none.

The error of a head is |out - exact| / |exact|, where exact attention has the bias. The mean over the heads of a layer
is a row, and so is the error of the hidden states with near_far in all layers.

    python tools/relative_position_errors.py train.txt.xz held-out.txt.xz --to results/position-bias.csv
"""

import argparse
import functools
import lzma
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import T5Config, T5EncoderModel

from nystrom import near_far_attention, reference
from nystrom.attention.methods.softmax import softmax_attention
from nystrom.attention.options import NearFarOptions
from nystrom.attention.parts.clusters import choose
from nystrom.integrations import set_attention
from nystrom.integrations.layer_calls import watched
from nystrom.landmarks import segment_means
from nystrom.linalg import pinv
from nystrom_lab.measure.rows import Row, append_rows

MASK, VOCABULARY, LENGTH, BATCH, SEED = 256, 260, 256, 8, 0
SIZES: dict[str, Any] = {"d_model": 128, "d_kv": 32, "num_heads": 4, "d_ff": 512, "num_layers": 4}
# The share of bytes that are masked.
SHARE = 0.15
LANDMARKS = 64


def read_bytes(path):
    """A text as numbers, one for each byte."""
    raw = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).long()


def batch_of(text, generator):
    """Bytes, the same with some masked, and which are masked."""
    start = torch.randint(len(text) - LENGTH, (BATCH, 1), generator=generator)
    ids = text[start + torch.arange(LENGTH)]
    masked = torch.rand(BATCH, LENGTH, generator=generator) < SHARE
    return ids, ids.masked_fill(masked, MASK), masked


def train(text, minutes):
    """The encoder, and the mean loss of its first and last 50 steps, in nats for each masked byte."""
    torch.manual_seed(SEED)
    config = T5Config(vocab_size=VOCABULARY, dropout_rate=0.0, feed_forward_proj="gated-gelu", **SIZES)
    model = T5EncoderModel._from_config(config, attn_implementation="sdpa")
    head = torch.nn.Linear(config.d_model, VOCABULARY)
    tables = [x for name, x in model.named_parameters() if "relative_attention_bias" in name]
    others = [x for name, x in model.named_parameters() if "relative_attention_bias" not in name]
    # T5's optimiser takes steps in proportion to a tensor, which are larger for its table.
    groups = [{"params": [*others, *head.parameters()], "lr": 1e-3}, {"params": tables, "lr": 1e-2}]
    optimizer, generator = torch.optim.AdamW(groups, weight_decay=0.0), torch.Generator().manual_seed(SEED)
    rates, losses, start = [group["lr"] for group in groups], [], time.monotonic()
    while (done := (time.monotonic() - start) / (60 * minutes)) < 1:
        ids, given, masked = batch_of(text, generator)
        states = model(input_ids=given).last_hidden_state[masked]
        loss = F.cross_entropy(head(states), ids[masked])
        # Up over the first twentieth, then down to zero.
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * min(20 * done + 0.02, 1 - done)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([*model.parameters(), *head.parameters()], 1.0)
        optimizer.step()
        losses.append(loss.item())
        if len(losses) % 50 == 0:
            print(len(losses), f"{sum(losses[-50:]) / 50:.3f}", flush=True)
    return model.eval(), len(losses), sum(losses[:50]) / 50, sum(losses[-50:]) / 50


def calls_of(model, ids):
    """Queries, keys, values and bias of each layer, with exact attention."""
    calls = []

    def see(_, route, tensors, scale):
        calls.append((*tensors[:3], route.bias))

    set_attention(model, "near_far", {"exact_up_to": ids.shape[1]})
    with torch.no_grad(), watched("near_far", see):
        states = model(input_ids=ids).last_hidden_state
    return calls, states


def reference_near_far(q, k, v, bias, chosen, options, far):
    """near_far by its formula, head by head; `far` says which bias far keys have."""
    place, size, out = torch.arange(q.shape[2]), options.block_size, []
    offset = place - place[:, None] // size * size
    near, between = (offset >= -options.reach) & (offset < size + options.reach), place - place[:, None]
    for head in range(q.shape[1]):
        pairs = bias.at_distance(bias.table[head], between) if far != "none at all" else torch.zeros(between.shape)
        # The formula divides by the root of the width.
        named = {"cluster": chosen.cluster[0, head], "num_clusters": options.num_clusters, "near": near, "bias": pairs}
        args = q[0, head] * q.shape[3] ** 0.5, k[0, head], v[0, head]
        out.append(reference.near_far_with_bias(*args, **named, far=torch.zeros_like(pairs)))
    return torch.stack(out)[None]


def nystrom_with_means(q, k, v, bias):
    """Nystrom attention whose three matrices have the mean bias of segments; none if it is None."""
    n = q.shape[2]
    marks = [segment_means(x, LANDMARKS) for x in (q, k)]
    segment = torch.arange(n) * LANDMARKS // n
    means = F.normalize(F.one_hot(segment, LANDMARKS).float().mT, p=1, dim=1)
    pairs = torch.zeros(q.shape[1], n, n)
    if bias is not None:
        pairs = bias.at_distance(bias.table, torch.arange(n) - torch.arange(n)[:, None])
    half = means @ pairs
    left = (q @ marks[1].mT + pairs @ means.mT).softmax(dim=-1)
    middle = (marks[0] @ marks[1].mT + half @ means.mT).softmax(dim=-1)
    right = (marks[0] @ k.mT + half).softmax(dim=-1)
    return left @ (pinv(middle) @ (right @ v))


def errors(q, k, v, bias, options):
    """The mean error over heads of each way."""
    exact = softmax_attention(q, k, v, bias=bias, scale=1.0)
    chosen = choose(q, k, None, None, options)
    found = {
        "near_far, far bias by side": near_far_attention(q, k, v, bias=bias, exact_up_to=0, scale=1.0),
        "near_far, no far bias": reference_near_far(q, k, v, bias, chosen, options, "none"),
        "near_far, no bias": reference_near_far(q, k, v, bias, chosen, options, "none at all"),
        f"nystrom-{LANDMARKS}, mean bias of segments": nystrom_with_means(q, k, v, bias),
        f"nystrom-{LANDMARKS}, no bias": nystrom_with_means(q, k, v, None),
    }
    for way, out in found.items():
        yield way, ((out - exact).norm(dim=(2, 3)) / exact.norm(dim=(2, 3))).mean().item()


def rows_of(model, text, length, count, facts):
    """Rows for one length: means over the texts."""
    sums, hidden = {}, 0.0
    for number in range(count):
        ids = text[None, number * length : (number + 1) * length]
        calls, states = calls_of(model, ids)
        for layer, (q, k, v, bias) in enumerate(calls):
            for way, error in errors(q, k, v, bias, NearFarOptions(exact_up_to=0, scale=1.0)):
                sums[way, layer] = sums.get((way, layer), 0.0) + error / count
        set_attention(model, "near_far", {"exact_up_to": 0})
        with torch.no_grad():
            ours = model(input_ids=ids).last_hidden_state
        hidden += ((ours - states).norm() / states.norm()).item() / count
    named = functools.partial(Row, study="position-bias", n=length, m=LANDMARKS, seed=SEED, repeats=count)
    quantity = "relative error of the output"
    for (way, layer), error in sums.items():
        yield named(quantity=quantity, method=way, value=error, facts={**facts, "layer": layer})
    for way in dict.fromkeys(way for way, _ in sums):
        layers = [error for (one, _), error in sums.items() if one == way]
        value = sum(layers) / len(layers)
        yield named(quantity=f"{quantity}, mean of the layers", method=way, value=value, facts=facts)
    name = "relative error of the hidden states"
    yield named(quantity=name, method="near_far, far bias by side", value=hidden, facts=facts)


def main():
    """Train, measure, and append rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("train", type=Path)
    parser.add_argument("held_out", type=Path)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096])
    parser.add_argument("--count", type=int, default=4, help="texts of each length")
    parser.add_argument("--to", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model, steps, first, last = train(read_bytes(args.train), args.minutes)
    (table,) = (x.detach() for name, x in model.named_parameters() if "relative_attention_bias" in name)
    print(f"{steps} steps, loss {first:.2f} to {last:.2f}; table {table.min():.2f} to {table.max():.2f}", flush=True)
    facts = {"texts": args.held_out.name, "model": f"T5-shaped, {steps} steps", "threads": 1}
    found = {"loss of masked bytes": (last, "nats"), "range of the table": ((table.max() - table.min()).item(), "")}
    named = functools.partial(Row, study="position-bias", method="softmax", seed=SEED, n=LENGTH, facts=facts)
    append_rows(args.to, [named(quantity=name, value=value, unit=unit) for name, (value, unit) in found.items()])
    for length in args.lengths:
        rows = list(rows_of(model, read_bytes(args.held_out), length, args.count, facts))
        for row in rows:
            print(row.n, row.fact("layer"), row.method, row.quantity, f"{row.value:.3f}", flush=True)
        append_rows(args.to, rows)


if __name__ == "__main__":
    main()
