#!/usr/bin/env bash
# neuralops==1.6.0 (with torch==2.13.0 CPU, transformers==5.23.0), seen 2026-11-27.
# Its Nystrom attention is registered as causal, and built with is_causal=True says that it is; yet outputs of tokens before
# position 700 change when only tokens from 700 on do (by about 1e-2 here, exact causal attention: 0). Two more things that a
# user would not guess: 64 landmarks asked are 32 landmarks used, without a word; and up to some 40 tokens it is exact attention.
# Exit status: 0 while the behaviour holds, 1 if it changed, 2 if the packages could not be installed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
pip() { python3 -m pip install -q --disable-pip-version-check --target "$work/p" "$@" >>"$work/log" 2>&1; }
pip "torch==2.13.0" "transformers==5.23.0" "numpy==2.4.6" "neuralops==1.6.0" || { cat "$work/log"; exit 2; }
cd "$work"
PYTHONPATH="$work/p" PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 python3 -W ignore - <<'PY'
import sys, torch
from neuralops.layers.linear.nystrom_attention import NystromAttention
from transformers import BertConfig
torch.manual_seed(0)
config = BertConfig(hidden_size=256, num_attention_heads=8, attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0)
layer = NystromAttention(config=config, num_landmarks=64, is_causal=True).eval()
for p in layer.parameters():
    p.data.normal_(0, 0.06)
x = torch.randn(1, 1024, 256)
y = x.clone()
y[:, 700:] = torch.randn(1, 324, 256)
with torch.no_grad():
    a, b = (out[0] if isinstance(out, tuple) else out for out in (layer(x), layer(y)))
moved = (a - b)[:, :700].abs().max().item()
print("is_causal", layer.is_causal, "landmarks asked 64, used", layer.num_landmarks)
print(f"largest change before position 700: {moved:.1e}, outputs of about {a.abs().mean():.1e}")
sys.exit(not (layer.is_causal and layer.num_landmarks == 32 and moved > 1e-4))
PY
