"""Whether the heads that make most of the error are the same on other texts and at other lengths.

For each model, file of texts and length, the effects of all heads (`nystrom.inspection.head_effects`) are those on the
first of two texts, with the model's own method, approximating at every length. On the second text, which nothing was
chosen by, the error of the hidden states is measured with no exact head, with the four of the largest effect on the
first, and with those of the first file and length.

    python tools/compare_heads.py --models FOLDER ... --texts papers.jsonl.xz reviews.jsonl.xz --to rows.csv

FOLDER is a model with one method and enough positions, such as `nystrom convert --attention near_far` makes. Without
--texts, and for the file "python", the Python language reference is read.
"""

import argparse
from pathlib import Path

import torch

from nystrom.attention.method_names import sized_name
from nystrom.inspection.candidates import SOFTMAX, Candidate
from nystrom.inspection.head_effects import head_effects, largest_effects
from nystrom.inspection.whole_model import compare_models, exact_results
from nystrom.models.files.model_fingerprint import model_fingerprint
from nystrom_lab.data.language.encoder_texts import Prose, load_encoder, read_batches, read_prose
from nystrom_lab.data.language.tokenizer import load_tokenizer
from nystrom_lab.data.sources.corpora import find_corpora
from nystrom_lab.measure.rows import Row, append_rows, cpu_name

MOST, ENOUGH = 4, 400_000
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
    """The four heads with the largest effects, and quantities with their values; `first` are those of another text."""
    exact = exact_results(model, batches)
    effects = head_effects(model, batches[:1], exact[:1], plain)
    total = sum(float(each.clamp(min=0).sum()) for each in effects.values())
    best = largest_effects(effects, MOST)
    found = [(f"share {place[0]}.{place[1]}", value / total) for place, value in best.items()]
    for name, heads in (("no", ()), ("its own", best), ("the first", first or best)):
        error = compare_models(model, batches[1:], exact[1:], with_heads(plain, heads)).error
        found.append((f"held-out hidden error, {name} exact heads", error))
    return best, found


def main():
    """Measure, and append rows after each text and length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, nargs="+", required=True)
    parser.add_argument("--texts", type=Path, nargs="*", default=[REFERENCE])
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048])
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
                batches = read_batches(prose, tokenizer, model, length=length, num_texts=2)
                best, found = rows_of(model, plain, batches, first)
                first = first or best
                heads = " ".join(f"{layer}.{head}" for layer, head in best)
                facts = {"model": folder.name, "fingerprint": fingerprint, "texts": path.name, "heads": heads}
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
