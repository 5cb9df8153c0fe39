#!/usr/bin/env bash
# performer-pytorch==1.1.4, torch==2.13.0 (CPU). Seen 2026-11-28.
# Guess: with causal=True a token's output does not depend on later tokens. Seen: it does. The features of the keys are
# divided by the exponential of the largest over the *whole* sequence before 1e-4 is added, so a large later key pushes
# earlier ones down to that constant: earlier outputs move by 40 % here, where the later tokens are five times as large.
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
layer = SelfAttention(64, heads=4, dim_head=16, causal=True, nb_features=64).eval()
x, later = torch.randn(1, 64, 64), torch.randn(1, 14, 64)
moved = {}
with torch.no_grad():
    before = layer(x)[:, :50]
    for size in (1, 5):
        after = layer(torch.cat([x[:, :50], size * later], dim=1))[:, :50]
        moved[size] = ((after - before).norm() / before.norm()).item()
        print(f"tokens 50 to 63 are others, {size} times as large: tokens 0 to 49 move by {moved[size]:.1e}")
sys.exit(0 if moved[1] > 1e-5 and moved[5] > 0.1 else 1)
PY
