"""How many passages find their paper, by models that read it in one pass, and by means over windows of 512 tokens.

Of the last papers of a file that have enough tokens, the first N tokens are read. A passage of 128 tokens from the
middle of their second half is taken out, and should be nearest to the rest of its own paper, by cosines of mean
embeddings.

    python tools/search_papers.py papers.jsonl.xz --exact MODEL --models FOLDER ... --to rows.csv

FOLDER is a model of at least N positions, such as `nystrom convert` makes; for the exact model, with stretched
positions, by `--attention softmax`.
"""

import argparse
import sys
import time
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoModel

import nystrom.integrations  # noqa: F401 (registers the methods that config.json names)
from nystrom_lab.data.language.tokenizer import load_tokenizer
from nystrom_lab.data.sources.corpora import find_corpora
from nystrom_lab.measure.rows import append_rows, cpu_name, new_row

WINDOW, PASSAGE = 512, 128


def papers_of(path, tokenizer, count, length):
    """The tokens of the last papers that have `length` of them, without special tokens."""
    corpora, _ = find_corpora([path])
    pieces = (piece for corpus in corpora for piece in corpus.pieces(False))
    texts = [piece.text.decode() for piece in pieces if piece.begins]
    rows = (tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for text in reversed(texts))
    papers = [row[: length - 2] for row in islice((row for row in rows if len(row) >= length - 2), count)]
    if len(papers) < count:
        sys.exit(
            f"{len(papers)} of {len(texts)} papers of {path} have {length} tokens; expected {count}: name a file with "
            "more, or take --length or --count smaller."
        )
    return papers


@torch.no_grad()
def embedding(model, tokenizer, tokens):
    """The mean of the last hidden states, and the mean over windows where a model cannot read all at once."""
    ids = torch.tensor([[tokenizer.cls_token_id, *tokens, tokenizer.sep_token_id]])
    return model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state.mean(1)[0]


def windows(model, tokenizer, tokens, most=None):
    """The mean of the embeddings of windows."""
    size = WINDOW - 2
    parts = [tokens[i : i + size] for i in range(0, len(tokens), size)][:most]
    return torch.stack([embedding(model, tokenizer, part) for part in parts]).mean(0)


def main():
    """Count, and write rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("papers", type=Path)
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
    ways = [] if args.exact is None else [("first 512 tokens", args.exact, 1), ("windows of 512", args.exact, None)]
    for name, folder, most in [*ways, *((folder.name, folder, 0) for folder in args.models)]:
        tokenizer, model = load_tokenizer(folder), AutoModel.from_pretrained(folder).eval()
        papers = papers_of(args.papers, tokenizer, args.count, args.length)
        middle = 3 * args.length // 4
        cut = slice(middle, middle + PASSAGE)
        asked = torch.stack([embedding(model, tokenizer, paper[cut]) for paper in papers])
        start = time.process_time()
        rest = []
        for paper in papers:
            tokens = paper[: cut.start] + paper[cut.stop :]
            read = embedding(model, tokenizer, tokens) if most == 0 else windows(model, tokenizer, tokens, most)
            rest.append(read)
        seconds = (time.process_time() - start) / len(papers)
        scores = F.normalize(asked, dim=-1) @ F.normalize(torch.stack(rest), dim=-1).T
        found = int((scores.argmax(1) == torch.arange(len(papers))).sum())
        common = {"study": "search papers", "method": name, "n": args.length, "dtype": "float32", "device": cpu_name()}
        append_rows(
            args.to,
            [
                new_row(quantity="passages found", value=found, unit="", repeats=len(papers), **common),
                new_row(quantity="processor time of a paper", value=seconds, unit="s", repeats=len(papers), **common),
            ],
        )
        print(f"{name}: {found} of {len(papers)}, {seconds:.2f} s of processor time each", flush=True)


if __name__ == "__main__":
    main()
