#!/usr/bin/env bash
# fair-esm==2.0.0, torch==2.13.0 (CPU). Seen 2026-11-30.
# Guess: an alignment has the same states in any batch, as padded rows are masked. Seen: the attention over rows is divided by
# the square root of the number of rows, padded ones included. So beside an alignment of 64 rows one of 4 is off by 44 %
# here, with random weights: its scores are a quarter as large. Padded columns change nothing. Give each depth a batch of
# its own.
# Exit status: 0 while the behaviour holds, 1 if it changed, 2 if the packages could not be installed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
pip() { python3 -m pip install -q --disable-pip-version-check --target "$work/p" "$@" >>"$work/log" 2>&1; }
pip "torch==2.13.0" "numpy==2.4.6" && pip --no-deps "fair-esm==2.0.0" || { cat "$work/log"; exit 2; }
cd "$work"
PYTHONPATH="$work/p" PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1 python3 -W ignore - <<'PY'
import sys
from argparse import Namespace

import torch
from esm import Alphabet, MSATransformer

draw = torch.Generator().manual_seed(0)
sizes = dict(embed_dim=64, ffn_embed_dim=128, attention_heads=4, layers=2, max_positions=128, embed_positions_msa=True)
training = dict(dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, max_tokens_per_msa=2**14, max_tokens=2**14)
alphabet = Alphabet.from_architecture("msa_transformer")
model = MSATransformer(Namespace(**sizes, **training), alphabet).eval()
with torch.no_grad():
    for weight in model.parameters():
        if weight.ndim == 2:
            weight.normal_(std=0.15, generator=draw)  # attention far from uniform


def alignment(rows, columns):
    letters = torch.randint(20, (rows, columns), generator=draw).tolist()
    return [(str(i), "".join("ACDEFGHIKLMNPQRSTVWY"[j] for j in row)) for i, row in enumerate(letters)]


def states(*alignments):
    tokens = alphabet.get_batch_converter()(list(alignments))[2]
    with torch.no_grad():
        return model(tokens, repr_layers=[2])["representations"][2][0, :4, :31]


few, off = alignment(4, 30), {}
alone = states(few)
for name, other in {"64 rows": alignment(64, 30), "60 columns": alignment(4, 60)}.items():
    off[name] = ((states(few, other) - alone).norm() / alone.norm()).item()
    print(f"4 rows of 30 columns beside an alignment of {name}: {off[name]:.1%} off")
sys.exit(0 if off["64 rows"] > 0.05 and off["60 columns"] < 1e-5 else 1)
PY
