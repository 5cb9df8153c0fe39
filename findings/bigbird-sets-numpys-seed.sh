#!/usr/bin/env bash
# transformers==5.23.0, torch==2.13.0 (CPU). Seen 2026-11-28.
# Guess: a forward pass of a torch model leaves numpy's random numbers alone. Seen: in training BigBird seeds numpy's global
# generator with the number of the layer, so whatever a training script draws from np.random after it (masks, crops,
# shuffles) is the same in each step, and the same for every seed of the script.
# Exit status: 0 while the behaviour holds, 1 if it changed, 2 if the packages could not be installed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
pip() { python3 -m pip install -q --disable-pip-version-check --target "$work/p" "$@" >>"$work/log" 2>&1; }
pip "torch==2.13.0" "transformers==5.23.0" "numpy==2.4.6" || { cat "$work/log"; exit 2; }
cd "$work"
PYTHONPATH="$work/p" PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 python3 -W ignore - <<'PY'
import sys
import numpy as np
import torch
from transformers import BigBirdConfig, BigBirdModel

config = BigBirdConfig(
    vocab_size=80, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, block_size=4,
    num_random_blocks=1, max_position_embeddings=400, hidden_dropout_prob=0, attention_probs_dropout_prob=0,
)

model = BigBirdModel(config).train()
drawn = {}
for seed in (1, 2):
    np.random.seed(seed)
    for step in (1, 2, 3):
        model(torch.randint(3, 60, (1, 128)))
        drawn[seed, step] = np.random.rand()
        print(f"seed {seed}, after step {step}: np.random.rand() is {drawn[seed, step]:.6f}")
sys.exit(0 if len(set(drawn.values())) == 1 else 1)
PY
