#!/usr/bin/env bash
# routing-transformer==1.6.1, torch==2.13.0 (CPU). Seen 2026-11-30.
# Guess: with causal=True a token's output does not depend on later tokens, and masked tokens (input_mask, True = real) change
# nothing. Seen: each cluster takes the window_size tokens of the whole sequence that are nearest to it, later and masked ones
# included, and a token that they crowd out is not attended to. So other later tokens move earlier ones by half here, and other
# masked tokens real ones by a third. Masks hold among the tokens that a cluster took. The clusters are drawn from the first
# input, also in eval().
# Exit status: 0 while the behaviour holds, 1 if it changed, 2 if the packages could not be installed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
pip() { python3 -m pip install -q --disable-pip-version-check --target "$work/p" "$@" >>"$work/log" 2>&1; }
pip "torch==2.13.0" "numpy==2.4.6" && pip --no-deps "routing-transformer==1.6.1" "einops==0.8.2" "local-attention==1.11.2" "hyper-connections==0.4.11" "torch-einops-utils==0.2.0" "mixture-of-experts==0.2.3" "product-key-memory==0.3.0" "colt5-attention==0.11.2" || { cat "$work/log"; exit 2; }
cd "$work"
PYTHONPATH="$work/p" PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1 python3 -W ignore - <<'PY'
import sys
import torch
from routing_transformer.routing_transformer import SelfAttention

off = lambda a, b: ((a - b).norm() / b.norm()).item()
torch.manual_seed(0)
x = torch.randn(1, 128, 64)
other = torch.cat([x[:, :80], torch.randn(1, 48, 64)], dim=1)
keep = torch.arange(128)[None] < 80
layers = {
    causal: SelfAttention(64, 1, max_seq_len=128, heads=4, local_attn_heads=0, window_size=32, causal=causal).eval()
    for causal in (True, False)
}
with torch.no_grad():
    for layer in layers.values():
        layer(x)  # the first call draws the clusters, in eval(), too
    later = off(layers[True](other)[0][:, :80], layers[True](x)[0][:, :80])
    masked = off(layers[False](other, input_mask=keep)[0][:, :80], layers[False](x, input_mask=keep)[0][:, :80])
    again = off(layers[True](x)[0], layers[True](x)[0])
print(f"causal=True: other later tokens move earlier ones by {later:.0%}")
print(f"input_mask: other masked tokens move real ones by {masked:.0%}")
print(f"the same call again: {again:.1e}")
sys.exit(0 if later > 0.02 and masked > 0.02 and again < 1e-6 else 1)
PY
