#!/usr/bin/env bash
# transformers==5.23.0, torch==2.13.0 (CPU). Seen 2026-11-30.
# Guess: with its attention_mask a text has the same states in any batch, as in BERT. Seen: FNet takes the mask and has no use
# for it, YOSO ignores it, and what convolutions read is not masked in CANINE, ConvBERT and Nystromformer, nor the tokens
# beside each token that MobileBERT embeds with it. So the states of a text move with the padding that its neighbours in
# the batch ask for: here, with random weights, by 6 to 93 %. Give each length a batch of its own.
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
from transformers import AutoModel, BertConfig, CanineConfig, ConvBertConfig, FNetConfig, MobileBertConfig
from transformers import NystromformerConfig, YosoConfig, logging

logging.set_verbosity_error()
sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, vocab_size=64)
text = torch.randint(3, 60, (1, 28), generator=torch.Generator().manual_seed(1))
padded, mask = torch.nn.functional.pad(text, (0, 12)), (torch.arange(40) < 28).long()[None]
moved = {}
for kind in (BertConfig, CanineConfig, ConvBertConfig, FNetConfig, MobileBertConfig, NystromformerConfig, YosoConfig):
    torch.manual_seed(0)
    model = AutoModel.from_config(kind(**sizes, max_position_embeddings=80, pad_token_id=0)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.normal_(std=0.15)  # attention far from uniform
        alone = model(input_ids=text).last_hidden_state
        states = model(input_ids=padded, attention_mask=mask).last_hidden_state[:, :28]
    name = kind.model_type
    moved[name] = ((states - alone).norm() / alone.norm()).item()
    print(f"{name}: 28 tokens have states that are {moved[name]:.1%} off with 12 masked tokens behind them")
bert = moved.pop("bert")
sys.exit(0 if bert < 1e-5 and min(moved.values()) > 0.01 else 1)
PY
