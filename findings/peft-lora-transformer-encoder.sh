#!/usr/bin/env bash
# peft==0.21.2, torch==2.13.0 (CPU). Seen 2026-11-28.
# Guess: an adapter of nn.TransformerEncoder changes its outputs in eval() as in train(). Seen: in eval() it does nothing.
# nn.TransformerEncoderLayer then takes a fast path, which reads the weights of linear1, linear2 and self_attn without
# calling them, and finds those of the frozen layers; with gradients too, since these need none. On out_proj an adapter does
# nothing in train() either, since nn.MultiheadAttention never calls it. merge_and_unload() has the adapter's outputs;
# torch.backends.mha.set_fastpath_enabled(False), too, except for out_proj.
# Exit status: 0 while the behaviour holds, 1 if it changed, 2 if the packages could not be installed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
pip() { python3 -m pip install -q --disable-pip-version-check --target "$work/p" "$@" >>"$work/log" 2>&1; }
pip "torch==2.13.0" "numpy==2.4.6" "transformers==5.23.0" "peft==0.21.2" || { cat "$work/log"; exit 2; }
cd "$work"
PYTHONPATH="$work/p" PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 python3 -W ignore - <<'PY'
import copy
import sys
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0)
base, x, seen = nn.TransformerEncoder(layer, 2).eval(), torch.randn(2, 10, 32), []
for target in (["linear1", "linear2"], ["self_attn"], ["out_proj"]):
    lora = LoraConfig(r=4, target_modules=target, init_lora_weights=False)  # as a trained one: not zero
    model = get_peft_model(copy.deepcopy(base), lora)
    outputs = [model.train()(x), model.eval()(x)]
    torch.backends.mha.set_fastpath_enabled(False)
    outputs.append(model(x))
    torch.backends.mha.set_fastpath_enabled(True)
    outputs.append(copy.deepcopy(model).merge_and_unload().eval()(x))
    seen.append([((out - base(x)).norm() / base(x).norm()).item() for out in outputs])
    print(f"LoRA on {target}: from the base model", dict(zip(("train", "eval", "no fast path", "merged"), seen[-1])))
wanted = [(True, False, True, True), (True, False, True, True), (False, False, False, True)]
sys.exit(0 if [tuple(off > 1e-3 for off in each) for each in seen] == wanted else 1)
PY
