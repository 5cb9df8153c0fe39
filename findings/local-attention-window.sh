#!/usr/bin/env bash
# local-attention==1.11.2, torch==2.13.0 (CPU). Seen 2026-11-28.
# Guess: window_size=16, causal=True lets each token see its last 16. Seen: from 17 to 32, by its place in its block, since
# a block also sees the whole block before it. exact_windowsize=True, "at maximum the number of keys equal to the window
# size", gives 17. Without causal a token sees 48: its block and one to each side.
# Exit status: 0 while the behaviour holds, 1 if it changed, 2 if the packages could not be installed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
pip() { python3 -m pip install -q --disable-pip-version-check --target "$work/p" "$@" >>"$work/log" 2>&1; }
pip "torch==2.13.0" "numpy==2.4.6" && pip --no-deps "local-attention==1.11.2" "einops==0.8.2" "hyper-connections==0.4.11" "torch-einops-utils==0.2.0" || { cat "$work/log"; exit 2; }
cd "$work"
PYTHONPATH="$work/p" PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 python3 -W ignore - <<'PY'
import sys
import torch
from local_attention import LocalAttention

torch.manual_seed(0)
n = 96
q, k, v = torch.randn(1, n, 16), torch.randn(1, n, 16), torch.eye(n)[None]  # the output is the weights
seen = {}
for name, options in {
    "causal": {"causal": True},
    "causal, exact_windowsize": {"causal": True, "exact_windowsize": True},
    "not causal": {"causal": False},
}.items():
    counts = (LocalAttention(window_size=16, **options)(q, k, v)[0] > 0).sum(-1)[32:64]
    seen[name] = (counts.min().item(), counts.max().item())
    print(f"{name}: tokens 32 to 63 see {seen[name][0]} to {seen[name][1]} tokens")
sys.exit(0 if list(seen.values()) == [(17, 32), (17, 17), (48, 48)] else 1)
PY
