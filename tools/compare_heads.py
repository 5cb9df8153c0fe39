"""Whether the heads that make most of the error are the same on other texts and at other lengths.

For each model, file of texts and length, four exact heads are chosen (`nystrom.inspection.choose_exact_heads`) by all
of the texts except the last, with the model's own method, approximating at every length. On the last text, which
nothing was chosen by, the error of the hidden states is measured with no exact head, with these four, and with those of
the first file and length. With --turns, the whole model reads the last text with exact attention, with no exact head
and with these four, in turns: wall-clock times, and their ratio to exact attention's. --heads gives the heads.

    python tools/compare_heads.py --models FOLDER ... --texts papers.jsonl.xz reviews.jsonl.xz --to rows.csv

FOLDER is a model with one method and enough positions, such as `nystrom convert --attention near_far` makes. Without
--texts, and for the file "python", the Python language reference is read.
"""

import argparse
import time
from functools import partial
from pathlib import Path

import torch

from nystrom.attention.method_names import sized_name
from nystrom.inspection import choose_exact_heads
from nystrom.inspection.candidates import SOFTMAX, Candidate
from nystrom.inspection.whole_model import compare_models, exact_results, results_of
from nystrom.integrations.layer_calls import attend_by, intercepted
from nystrom.interleaved_timing import in_turns, quartiles, ratios
from nystrom.models.files.model_fingerprint import model_fingerprint
from nystrom_lab.data.language.encoder_texts import Prose, load_encoder, read_batches, read_prose
from nystrom_lab.data.language.tokenizer import load_tokenizer
from nystrom_lab.data.sources.corpora import find_corpora
from nystrom_lab.measure.rows import Row, append_rows, cpu_name

ENOUGH = 400_000
REFERENCE = Path("python")


def texts_of(path):
    """Running text: the column of texts of rows, or a file of text."""
    if path == REFERENCE:
        return read_prose([])
    parts, size = [], 0
    for corpus in find_corpora([path])[0]:
        for piece in corpus.pieces():
            parts.append(piece.text.decode("utf-8", errors="replace"))
            size += len(parts[-1])
            if size > ENOUGH:
                break
    return Prose(path.name, "\n".join(parts))


def with_heads(plain, heads):
    """The method in all layers, with some heads exact."""
    layers = {layer for layer, _ in heads}
    choice = {layer: plain.with_exact_heads([head for at, head in heads if at == layer]) for layer in layers}
    return {None: plain, **choice}


def seconds_of(model, batch, choice):
    """The seconds of one pass of the whole model."""

    def attend(call):
        candidate = choice.get(call.layer, choice[None])
        return attend_by(candidate.method, call, candidate.options)

    with intercepted(model, attend):
        start = time.perf_counter()
        results_of(model, batch)
        return time.perf_counter() - start


def times_of(model, batch, plain, heads, turns):
    """Quantities with their quartiles: the seconds of each way, and exact attention's over them."""
    ways = {"exact": {None: SOFTMAX}, "no exact heads": {None: plain}, "exact heads": with_heads(plain, heads)}
    taken = in_turns({way: partial(seconds_of, model, batch, choice) for way, choice in ways.items()}, turns)
    for way, seconds in taken.items():
        yield f"model time, {way}", quartiles(seconds)
        if way != "exact":
            yield f"model time of exact attention / {way}", ratios(taken["exact"], seconds)


def rows_of(model, plain, batches, first, given=()):
    """The four chosen heads, or those given, and quantities with their values; `first` are those of another text."""
    shares = {}
    if not given:
        shares = choose_exact_heads(model, batches[:-1], plain.method, plain.options).measurements["exact heads"]
    best = [tuple(map(int, place.split("."))) for place in given or shares]
    found = [(f"share {place}", value) for place, value in shares.items()]
    batches, exact = batches[-1:], exact_results(model, batches[-1:])
    for name, heads in (("no", ()), ("its own", best), ("the first", first or best)):
        error = compare_models(model, batches, exact, with_heads(plain, heads)).error
        found.append((f"held-out hidden error, {name} exact heads", error))
    return best, found


def main():
    """Measure, and append rows after each text and length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, nargs="+", required=True)
    parser.add_argument("--texts", type=Path, nargs="*", default=[REFERENCE])
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048])
    parser.add_argument("--count", type=int, default=2, help="texts of each kind, the last of them held out")
    parser.add_argument("--heads", nargs="*", default=(), help="as layer.head; chosen if not given")
    parser.add_argument("--turns", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--to", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    kinds = {path: texts_of(path) for path in args.texts}
    for folder in args.models:
        model, tokenizer, first = load_encoder(folder, length=max(args.lengths)), load_tokenizer(folder), {}
        method, options = model.config.attention, model.config.attention_options
        fingerprint = model_fingerprint(folder)
        if method == "near_far":
            options = {**options, "exact_up_to": 0}
        name, size = sized_name(method, options)
        plain = Candidate(name, method, options, size)
        assert plain != SOFTMAX, "a method that approximates"
        for length in args.lengths:
            for path, prose in kinds.items():
                batches = read_batches(prose, tokenizer, model, length=length, num_texts=args.count)
                best, found = rows_of(model, plain, batches, first, args.heads)
                first = first or best
                heads = " ".join(f"{layer}.{head}" for layer, head in best)
                facts = {"model": folder.name, "fingerprint": fingerprint, "texts": path.name, "heads": heads}
                print(folder.name, path.name, length, *(f"{what} {value:.3f}" for what, value in found), flush=True)
                row = partial(Row, study="heads", method=name, m=size, n=length, dtype="float32", device=cpu_name())
                append_rows(args.to, [row(quantity=what, value=value, facts=facts) for what, value in found])
                if args.turns:
                    facts["threads"] = args.threads
                    times = dict(times_of(model, batches[-1], plain, best, args.turns))
                    print(
                        *(f"{what} {low:.3f} {middle:.3f} {high:.3f};" for what, (low, middle, high) in times.items())
                    )
                    found = [
                        row(quantity=what, value=middle, low=low, high=high, unit="" if "/" in what else "s",
                            repeats=args.turns, facts=facts)
                        for what, (low, middle, high) in times.items()
                    ]  # fmt: skip
                    append_rows(args.to, found)


if __name__ == "__main__":
    main()
