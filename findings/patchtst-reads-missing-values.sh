#!/usr/bin/env bash
# transformers==5.23.0, torch==2.13.0 (CPU). Seen 2026-11-30.
# Guess: values that a mask calls missing are not read. Seen: in PatchTST (past_observed_mask) and PatchTSMixer (observed_mask)
# the mask leaves them out of the scale alone, and the model reads them. "NaNs that were replaced by zeros", as the
# documentation has them, are then values of zero: in a series around 100 they are a hundred standard deviations away. So the
# same series with the same four of 32 values missing has another forecast, beyond the 100, at another level; without missing
# values, or filled with the mean of the others, it has the same one (random weights).
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
from transformers import PatchTSMixerConfig, PatchTSMixerForPrediction, PatchTSTConfig, PatchTSTForPrediction, logging

logging.set_verbosity_error()
sizes = dict(num_input_channels=1, context_length=32, patch_length=8, patch_stride=8, prediction_length=4, d_model=32)
layers = dict(num_hidden_layers=2, num_attention_heads=4, ffn_dim=48)
torch.manual_seed(0)
models = {
    "past_observed_mask": PatchTSTForPrediction(PatchTSTConfig(**sizes, **layers)),
    "observed_mask": PatchTSMixerForPrediction(PatchTSMixerConfig(**sizes, num_layers=2)),
}
series, observed = torch.randn(1, 32, 1), torch.ones(1, 32, 1)
observed[:, 10:14] = 0
moved = {}
for name, model in models.items():
    with torch.no_grad():
        for weight in model.eval().parameters():
            if weight.ndim == 2:
                weight.normal_(std=0.15)
    for fill in ("nothing missing", "zeros", "the mean of the others"):
        forecasts = []
        for level in (0, 100):
            values, mask = series + level, torch.ones_like(observed) if fill == "nothing missing" else observed
            mean = (values * observed).sum() / observed.sum()
            values = torch.where(mask.bool(), values, 0.0 if fill == "zeros" else mean)
            with torch.no_grad():
                forecasts.append(model(past_values=values, **{name: mask}).prediction_outputs - level)
        kind = type(model).__name__
        moved[kind, fill] = (forecasts[1] - forecasts[0]).abs().max().item()
        print(f"{kind}, {fill}: the forecast is {moved[kind, fill]:.1e} off at another level of the series")
zeros = [off for (_, fill), off in moved.items() if fill == "zeros"]
others = [off for (_, fill), off in moved.items() if fill != "zeros"]
sys.exit(0 if min(zeros) > 1 and max(others) < 0.01 else 1)
PY
