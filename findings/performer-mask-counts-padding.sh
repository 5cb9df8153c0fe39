#!/usr/bin/env bash
# performer-pytorch==1.1.4, torch==2.13.0 (CPU). Seen 2026-11-28.
# Guess: masked tokens (mask, True = real) get no weight. Seen: the mask sets their values to zero and leaves their keys in
# the sum that weights are divided by. So with as many padded tokens as real ones outputs shrink to about half, and what the
# padded tokens hold still changes them a little. Cut the padding off instead.
# Exit status: 0 while the behaviour holds, 1 if it changed, 2 if the packages could not be installed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
pip() { python3 -m pip install -q --disable-pip-version-check --target "$work/p" "$@" >>"$work/log" 2>&1; }
pip "torch==2.13.0" "numpy==2.4.6" && pip --no-deps "performer-pytorch==1.1.4" "local-attention==1.11.2" "axial-positional-embedding==0.3.12" "einops==0.8.2" "hyper-connections==0.4.11" "torch-einops-utils==0.2.0" || { cat "$work/log"; exit 2; }
cd "$work"
PYTHONPATH="$work/p" PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 python3 -W ignore - <<'PY'
import sys
import torch
from performer_pytorch import SelfAttention

torch.manual_seed(0)
layer = SelfAttention(64, heads=4, dim_head=16, nb_features=64).eval()
layer.to_out = torch.nn.Identity()
with torch.no_grad():
    layer.to_v.weight.zero_()
    layer.to_v.weight[:, 0] = 1  # the values are channel 0, which is one for every token
x = torch.randn(1, 64, 64)
x[..., 0] = 1
sums = {}
with torch.no_grad():
    for padded in (0, 64, 448):
        tokens = torch.cat([x, torch.zeros(1, padded, 64)], dim=1)
        sums[padded] = layer(tokens, mask=torch.arange(64 + padded)[None] < 64)[:, :64].mean().item()
        print(f"{padded} padded tokens: weights on the 64 real ones sum to {sums[padded]:.2f}")
sys.exit(0 if sums[0] > 0.95 and sums[64] < 0.8 and sums[448] < 0.4 else 1)
PY
