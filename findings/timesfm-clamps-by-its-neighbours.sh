#!/usr/bin/env bash
# transformers==5.23.0, torch==2.13.0 (CPU). Seen 2026-11-30.
# Guess: TimesFM forecasts each series of a batch by itself. Seen: TimesFm2_5ModelForPrediction sets forecasts below zero to
# zero where no value of the *batch* is negative, by default (infer_is_positive). So the same counts have a forecast of zeros
# alone or beside other counts, and a negative one beside a series with a value below zero. TimesFmModelForPrediction does the
# same with truncate_negative=True. truncate_negative=False clamps none; batches of one clamp each series by itself.
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
from transformers import TimesFm2_5Config, TimesFm2_5ModelForPrediction, logging

logging.set_verbosity_error()
torch.manual_seed(0)
sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4)
config = TimesFm2_5Config(**sizes, head_dim=8, patch_length=8, context_length=64, horizon_length=16)
model = TimesFm2_5ModelForPrediction(config).eval()
with torch.no_grad():
    for weight in model.parameters():
        if weight.ndim == 2:
            weight.normal_(std=0.15)

counts = torch.rand(64, generator=torch.Generator().manual_seed(1))  # none is below zero
batches = {"alone": [counts], "beside positive numbers": [counts, counts + 5], "beside negative ones": [counts, counts - 5]}
lowest = {}
for name, batch in batches.items():
    for options in ({}, {"truncate_negative": False}):
        with torch.no_grad():
            lowest[name, len(options)] = model(past_values=batch, **options).mean_predictions[0].min().item()
    clamped, free = lowest[name, 0], lowest[name, 1]
    print(f"{name}: the lowest forecast is {clamped:.3f}, with truncate_negative=False {free:.3f}")
alone, positive, negative = (lowest[name, 0] for name in batches)
free = [lowest[name, 1] for name in batches]
sys.exit(0 if alone == positive == 0 and negative < -0.1 and max(free) - min(free) < 1e-5 else 1)
PY
