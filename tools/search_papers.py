"""How many passages find their paper, by models that read it in one pass, and by means over windows of 512 tokens.

The models read the first N tokens of the last papers of a file that have enough of them. A passage of 128 tokens from
the middle of their second half is taken out, and should be nearest to the rest of its own paper, by cosines of mean
embeddings.

    python tools/search_papers.py papers.jsonl.xz --exact MODEL --models FOLDER ... --to rows.csv

Without papers, the pages and paragraphs of examples/demo.py are searched, of up to N tokens.

FOLDER is a model of at least N positions, such as `nystrom convert` makes; for the exact model, with stretched
positions, by `--attention softmax`.
"""

import argparse
import pydoc_data.topics
import sys
import time
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F

from nystrom.models.files.model_fingerprint import model_fingerprint
from nystrom_lab.data.language.encoder_texts import load_encoder
from nystrom_lab.data.language.tokenizer import load_tokenizer
from nystrom_lab.data.sources.corpora import find_corpora
from nystrom_lab.measure.rows import Row, append_rows, cpu_name

WINDOW, PASSAGE = 512, 128


def pages_of(tokenizer, length):
    """The pages of the demo, the paragraphs that it takes out of them, and for each the place of its page."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    from demo import hold_out  # pyright: ignore[reportMissingImports]

    topics = dict(sorted(pydoc_data.topics.topics.items(), key=lambda page: -len(page[1])))
    pages, asked = hold_out(topics, tokenizer, length)
    right = [list(pages).index(name) for name, _ in asked]
    # Without special tokens.
    return [ids[1:-1] for ids in pages.values()], [ids[1:-1] for _, ids in asked], right


def papers_of(path, tokenizer, count, length):
    """The last papers that have `length` tokens without a passage each, these, and for each the place of its paper."""
    corpora, _ = find_corpora([path])
    pieces = (piece for corpus in corpora for piece in corpus.pieces())
    texts = [piece.text.decode() for piece in pieces if piece.begins]
    rows = (tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for text in reversed(texts))
    papers = [row[: length - 2] for row in islice((row for row in rows if len(row) >= length - 2), count)]
    if len(papers) < count:
        sys.exit(
            f"{len(papers)} of {len(texts)} papers of {path} have {length} tokens; expected {count}: name a file with "
            "more, or take --length or --count smaller."
        )
    start = 3 * length // 4
    end = start + PASSAGE
    return [paper[:start] + paper[end:] for paper in papers], [paper[start:end] for paper in papers], list(range(count))


@torch.no_grad()
def embedding(model, tokenizer, tokens):
    """The mean of the last hidden states, and the mean over windows where a model cannot read all at once."""
    ids = torch.tensor([[tokenizer.cls_token_id, *tokens, tokenizer.sep_token_id]])
    return model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state.mean(1)[0]


def windows(model, tokenizer, tokens, most=None):
    """The mean of the embeddings of windows, each as often as it has tokens: the last one may have few."""
    size = WINDOW - 2
    parts = [tokens[i : i + size] for i in range(0, len(tokens), size)][:most]
    sums = [len(part) * embedding(model, tokenizer, part) for part in parts]
    return torch.stack(sums).sum(0) / sum(map(len, parts))


def main():
    """Count, and write rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("papers", type=Path, nargs="?")
    parser.add_argument("--exact", type=Path, help="folder of the exact model, for windows")
    parser.add_argument("--models", type=Path, nargs="*", default=())
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--count", type=int, default=63)
    parser.add_argument("--to", type=Path, required=True)
    args = parser.parse_args()
    if args.exact is None and not args.models:
        parser.error("nothing reads the papers: name --exact, or folders with --models")
    if args.length < 6 * PASSAGE:
        parser.error(
            f"--length is {args.length}; expected {6 * PASSAGE} or more, to take {PASSAGE} from its second half"
        )
    torch.set_num_threads(1)
    kind = "page" if args.papers is None else "paper"
    ways = [] if args.exact is None else [("first 512 tokens", args.exact, 1), ("windows of 512", args.exact, None)]
    for name, folder, most in [*ways, *((folder.name, folder, 0) for folder in args.models)]:
        tokenizer, model = load_tokenizer(folder), load_encoder(folder).base_model
        if args.papers is None:
            rest, passages, right = pages_of(tokenizer, args.length)
        else:
            rest, passages, right = papers_of(args.papers, tokenizer, args.count, args.length)
        asked = torch.stack([embedding(model, tokenizer, passage) for passage in passages])
        start = time.process_time()
        read = [
            embedding(model, tokenizer, tokens) if most == 0 else windows(model, tokenizer, tokens, most)
            for tokens in rest
        ]
        seconds = (time.process_time() - start) / len(rest)
        scores = F.normalize(asked, dim=-1) @ F.normalize(torch.stack(read), dim=-1).T
        found = int((scores.argmax(1) == torch.tensor(right)).sum())
        facts = {"fingerprint": model_fingerprint(folder)}
        common = {"method": name, "n": args.length, "dtype": "float32", "device": cpu_name(), "facts": facts}
        values = (("passages found", found, "", right), (f"processor time of a {kind}", seconds, "s", rest))
        rows = [
            Row(study=f"search {kind}s", quantity=quantity, value=value, unit=unit, repeats=len(of), **common)
            for quantity, value, unit, of in values
        ]
        append_rows(args.to, rows)
        print(f"{name}: {found} of {len(right)}, {seconds:.2f} s of processor time each", flush=True)


if __name__ == "__main__":
    main()
