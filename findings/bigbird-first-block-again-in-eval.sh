#!/usr/bin/env bash
# transformers==5.23.0, torch==2.13.0 (CPU). Seen 2026-11-28.
# Guess: BigBird's random blocks are drawn in training and fixed in eval(). Seen: in eval() every random block is block 0,
# which all tokens see anyway: there are no random blocks, and the keys of block 0 count 1 + num_random_blocks times in the
# softmax. With equal scores and three random blocks (the default) they get half of the weight, and 1/8 in training.
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
from transformers import BigBirdConfig
from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention, BigBirdModel

blocks, size = 16, 4
config = BigBirdConfig(
    hidden_size=16, num_attention_heads=1, block_size=size, num_random_blocks=3, attention_probs_dropout_prob=0
)
layer = BigBirdBlockSparseAttention(config, seed=0)
with torch.no_grad():
    for part in (layer.query, layer.key, layer.value):
        part.weight.zero_()
        part.bias.zero_()
    layer.value.weight.copy_(torch.eye(16))  # equal scores; the value of a token names its block
x = torch.eye(16).repeat_interleave(size, dim=0)[None]
keep = torch.ones(1, blocks * size)
blocked, band, rows, columns = BigBirdModel.create_masks_for_block_sparse_attn(keep, size)
weights = {}
for mode in ("train", "eval"):
    getattr(layer, mode)()
    with torch.no_grad():
        out = layer(x, band, rows, columns, blocked, blocked)[0]
    weights[mode] = out[0, 8 * size]  # of a token of block 8, on each block
    print(mode, [round(w, 3) for w in weights[mode].tolist()])
train, evaluated = weights["train"], weights["eval"]
holds = abs(train[0] - 1 / 8) < 1e-3 and int((train > 0).sum()) == 8 and abs(evaluated[0] - 4 / 8) < 1e-3
sys.exit(0 if holds and int((evaluated > 0).sum()) == 5 else 1)
PY
