#!/usr/bin/env bash
# transformers==5.23.0, torch==2.13.0 (CPU). Seen 2026-11-28.
# Guess: NystromformerModel(NystromformerConfig()) has Nystrom attention with 64 landmarks. Seen: where num_landmarks equals
# segment_means_seq_len, as by default (64 and 64), it computes all n x n weights, at any length, and the convolution beside
# them. Any other number needs inputs of exactly segment_means_seq_len tokens, without padding.
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
from transformers import NystromformerConfig
from transformers.models.nystromformer.modeling_nystromformer import NystromformerSelfAttention

torch.manual_seed(0)
config = NystromformerConfig(hidden_size=32, num_attention_heads=4, attention_probs_dropout_prob=0.0)
print("num_landmarks", config.num_landmarks, "segment_means_seq_len", config.segment_means_seq_len)
layer = NystromformerSelfAttention(config).eval()
x = torch.randn(1, 1024, 32)
with torch.no_grad():
    layer.conv.weight.zero_()
    q, k, v = (part(x).view(1, 1024, 4, 8).transpose(1, 2) for part in (layer.query, layer.key, layer.value))
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    off = ((layer(x)[0] - exact).norm() / exact.norm()).item()
print(f"1,024 tokens: {off:.1e} from softmax attention")
sys.exit(0 if off < 1e-5 and config.num_landmarks == config.segment_means_seq_len == 64 else 1)
PY
