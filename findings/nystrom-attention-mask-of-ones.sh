#!/usr/bin/env bash
# nystrom-attention==0.0.14, torch==2.13.0 (CPU). Seen 2026-11-28.
# Guess: a mask of ones is no mask. Seen: at a length that is no multiple of the landmarks the two differ, since zeros are put
# in front, and without a mask they are tokens. And a sequence's output depends on its neighbours in the batch, with a mask
# or without: the start value of the inverse is scaled by the largest sums of the whole batch.
# Exit status: 0 while the behaviour holds, 1 if it changed, 2 if the packages could not be installed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
pip() { python3 -m pip install -q --disable-pip-version-check --target "$work/p" "$@" >>"$work/log" 2>&1; }
pip "torch==2.13.0" "numpy==2.4.6" && pip --no-deps "nystrom-attention==0.0.14" "einops==0.8.2" || { cat "$work/log"; exit 2; }
cd "$work"
PYTHONPATH="$work/p" PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 python3 -W ignore - <<'PY'
import sys
import torch
from nystrom_attention import NystromAttention

torch.manual_seed(0)
layer = NystromAttention(dim=64, dim_head=16, heads=4, num_landmarks=32).eval()
off = lambda a, b: ((a - b).norm() / b.norm()).item()
apart = {}
with torch.no_grad():
    for n in (96, 100):
        x, ones = torch.randn(1, n, 64), torch.ones(1, n, dtype=torch.bool)
        apart[n] = off(layer(x, mask=ones), layer(x))
        print(f"{n} tokens, 32 landmarks: {apart[n]:.1e} between a mask of ones and none")
    both = torch.cat([x, 3 * torch.randn(1, n, 64)])
    beside = off(layer(both, mask=ones.expand(2, n))[:1], layer(x, mask=ones))
print(f"beside another sequence: {beside:.1e} off")
sys.exit(0 if apart[96] < 1e-6 and apart[100] > 0.01 and beside > 1e-3 else 1)
PY
