"""How many masked tokens language models get right, and their loss, on the texts that a healing held out.

    python tools/masked_accuracy.py texts.jsonl --shortest 192 --models FOLDER ... --to rows.csv

The texts are those of `nystrom convert --heal` where its steps read all of the file.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoModelForMaskedLM

import nystrom.integrations  # noqa: F401 (registers the methods that config.json names)
from nystrom_lab.data.language.tokenizer import load_tokenizer
from nystrom_lab.data.sources.corpora import find_corpora
from nystrom_lab.measure.rows import append_rows, cpu_name, new_row

MASKED = 0.15


def main():
    """Count, and write rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path)
    parser.add_argument("--models", type=Path, nargs="+", required=True)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--shortest", type=int, required=True)
    parser.add_argument("--held-out", type=int, default=32)
    parser.add_argument("--to", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    pieces = (piece for corpus in find_corpora([args.texts])[0] for piece in corpus.pieces())
    texts = [piece.text.decode() for piece in pieces if piece.begins]
    tokenizer = load_tokenizer(args.models[0])
    rows = [tokenizer(text, truncation=True, max_length=args.length)["input_ids"] for text in texts]
    rows = [row for row in rows if len(row) >= args.shortest]
    held_out = [rows[i] for i in np.random.default_rng(0).permutation(len(rows))[: args.held_out]]
    for folder in args.models:
        model = AutoModelForMaskedLM.from_pretrained(folder).eval()
        generator = torch.Generator().manual_seed(0)
        right, losses = [], []
        for row in held_out:
            ids = torch.tensor([row])
            masked = torch.rand(ids.shape, generator=generator) < MASKED
            # The tokens of the tokenizer.
            masked[:, [0, -1]] = False
            with torch.no_grad():
                read = torch.where(masked, tokenizer.mask_token_id, ids)
                logits = model(input_ids=read, attention_mask=torch.ones_like(ids)).logits[masked]
            right += (logits.argmax(-1) == ids[masked]).tolist()
            losses += F.cross_entropy(logits, ids[masked], reduction="none").tolist()
        found = {"masked accuracy": sum(right) / len(right), "masked loss": sum(losses) / len(losses)}
        common = {"method": folder.name, "n": args.length, "dtype": "float32", "seed": 0, "device": cpu_name()}
        append_rows(
            args.to,
            [
                new_row(study="masked tokens", quantity=quantity, value=value, repeats=len(right), **common)
                for quantity, value in found.items()
            ],
        )
        print(f"{folder.name}: {found}", flush=True)


if __name__ == "__main__":
    main()
