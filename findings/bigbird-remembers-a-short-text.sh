#!/usr/bin/env bash
# transformers==5.23.0, torch==2.13.0 (CPU). Seen 2026-11-28.
# Guess: BigBird reads each text by itself. Seen: one short text (here 12 tokens, at the default sizes up to 704) switches
# the whole model from block-sparse to full attention, for all later texts of any length, in time and memory n^2. So what a
# long text gives depends on what was read before it. The warning speaks of the short text; config.attention_type still says
# "block_sparse". model.set_attention_type("block_sparse") switches back.
# Exit status: 0 while the behaviour holds, 1 if it changed, 2 if the packages could not be installed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
pip() { python3 -m pip install -q --disable-pip-version-check --target "$work/p" "$@" >>"$work/log" 2>&1; }
pip "torch==2.13.0" "transformers==5.23.0" "numpy==2.4.6" || { cat "$work/log"; exit 2; }
cd "$work"
PYTHONPATH="$work/p" PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 python3 -W ignore - <<'PY'
import sys
import torch
from transformers import BigBirdConfig, BigBirdModel

torch.manual_seed(0)

config = BigBirdConfig(
    vocab_size=80, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, block_size=4,
    num_random_blocks=1, max_position_embeddings=400, hidden_dropout_prob=0, attention_probs_dropout_prob=0,
)

model = BigBirdModel(config).eval()
with torch.no_grad():
    for weight in model.parameters():
        if weight.ndim == 2:
            weight.normal_(std=0.15)
    long, short = torch.randint(3, 60, (1, 128)), torch.randint(3, 60, (1, 12))
    first, again = model(long)[0], model(long)[0]
    model(short)
    after = model(long)[0]
    full = model.config.attention_type, model.attention_type
    model.set_attention_type("block_sparse")
    back = model(long)[0]
moved = ((after - first).norm() / first.norm()).item()
print(f"the long text twice: {(again - first).abs().max().item():.1e} apart; after a short one: {moved:.2f} off")
print("config:", full[0], "model:", full[1])
same = torch.equal(first, again) and torch.equal(first, back)
sys.exit(0 if same and moved > 0.1 and full == ("block_sparse", "original_full") else 1)
PY
