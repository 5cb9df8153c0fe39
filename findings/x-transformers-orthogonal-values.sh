#!/usr/bin/env bash
# x-transformers==2.31.10, torch==2.13.0 (CPU). Seen 2026-11-30.
# Guess: an option of a Decoder keeps it causal, and one of an Encoder keeps to its mask. Seen: attn_orthog_projected_values=
# True takes from what a token attends to the part along the token's own values, and computes that part over all tokens of the
# sequence at once. So tokens of a Decoder see later ones, and masked tokens of an Encoder change real ones: by about 1e-3
# here, with weights as they are first drawn. attn_orthog_projected_values_per_head=True does the same. With neither it is 0.
# Exit status: 0 while the behaviour holds, 1 if it changed, 2 if the packages could not be installed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
pip() { python3 -m pip install -q --disable-pip-version-check --target "$work/p" "$@" >>"$work/log" 2>&1; }
pip "torch==2.13.0" "numpy==2.4.6" && pip --no-deps "x-transformers==2.31.10" "einops==0.8.2" "einx==0.4.3" "frozendict==2.5.1" "loguru==0.7.3" "packaging==26.4" "torch-einops-utils==0.2.0" || { cat "$work/log"; exit 2; }
cd "$work"
PYTHONPATH="$work/p" PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1 python3 -W ignore - <<'PY'
import sys
import torch
from x_transformers import Decoder, Encoder

off = lambda a, b: ((a - b).norm() / b.norm()).item()
torch.manual_seed(0)
x = torch.randn(1, 48, 64)
y = torch.cat([x[:, :30], torch.randn(1, 18, 64)], dim=1)
keep, moved = torch.arange(48)[None] < 30, {}
for options in ({}, {"attn_orthog_projected_values": True}, {"attn_orthog_projected_values_per_head": True}):
    sizes = dict(dim=64, depth=2, heads=4, attn_dim_head=16, **options)
    decoder, encoder = Decoder(**sizes).eval(), Encoder(**sizes).eval()
    with torch.no_grad():
        later = off(decoder(y)[:, :30], decoder(x)[:, :30])
        masked = off(encoder(y, mask=keep)[:, :30], encoder(x, mask=keep)[:, :30])
    name = " ".join(options) or "neither option"
    moved[name] = later, masked
    print(f"{name}: later tokens of a Decoder move earlier ones by {later:.1e}, masked ones of an Encoder by {masked:.1e}")
plain, whole, per_head = moved.values()
sys.exit(0 if max(plain) < 1e-5 and min(whole) > 1e-4 else 1)
PY
