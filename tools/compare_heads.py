"""Whether the heads that make most of the error are the same on other texts and at other lengths.

For each model, file of texts and length, four exact heads are chosen (`nystrom.inspection.choose_exact_heads`) by all
of the texts except the last, with the model's own method, approximating at every length. On the last text, which
nothing was chosen by, the error of the hidden states is measured with no exact head, with these four, and with those of
the first file and length.

    python tools/compare_heads.py --models FOLDER ... --texts papers.jsonl.xz reviews.jsonl.xz --to rows.csv

FOLDER is a model with one method and enough positions, such as `nystrom convert --attention near_far` makes. Without
--texts, and for the file "python", the Python language reference is read.
"""

import argparse
from pathlib import Path

import torch

from nystrom.attention.method_names import sized_name
from nystrom.inspection import choose_exact_heads
from nystrom.inspection.candidates import SOFTMAX, Candidate
from nystrom.inspection.whole_model import compare_models, exact_results
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


def rows_of(model, plain, batches, first):
    """The four chosen heads, and quantities with their values; `first` are those of another text."""
    shares = choose_exact_heads(model, batches[:-1], plain.method, plain.options).found["exact heads"]
    best = [tuple(map(int, place.split("."))) for place in shares]
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
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--to", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    kinds = {path: texts_of(path) for path in args.texts}
    for folder in args.models:
        model, tokenizer, first = load_encoder(folder, length=max(args.lengths)), load_tokenizer(folder), {}
        method, options = model.config.attention, model.config.attention_options
        if method == "near_far":
            options = {**options, "exact_up_to": 0}
        name, size = sized_name(method, options)
        plain = Candidate(name, method, options, size)
        assert plain != SOFTMAX, "a method that approximates"
        for length in args.lengths:
            for path, prose in kinds.items():
                batches = read_batches(prose, tokenizer, model, length=length, num_texts=args.count)
                best, found = rows_of(model, plain, batches, first)
                first = first or best
                facts = {"model": folder.name, "texts": path.name, "heads": " ".join(f"{a}.{b}" for a, b in best)}
                print(folder.name, path.name, length, *(f"{what} {value:.3f}" for what, value in found), flush=True)
                append_rows(
                    args.to,
                    [
                        Row(study="heads", quantity=what, method=name, m=size, value=value, n=length, dtype="float32",
                            device=cpu_name(), facts=facts)
                        for what, value in found
                    ],
                )  # fmt: skip


if __name__ == "__main__":
    main()
