#!/usr/bin/env bash
# torch==2.13.0 (CPU), onnxruntime==1.31.1, onnx==1.23.2, onnxscript==0.7.2. Seen 2026-11-28.
# Guess: an exported scaled_dot_product_attention gives what torch gives. Seen: a query whose boolean mask is all False gets
# zeros in torch, and at opset 18, the default, the mean of all values (of the masked tokens, then) in the exported model;
# at opset 23, where attention is one operator, zeros again. So padded rows hold other numbers behind a pooling.
# Exit status: 0 while the behaviour holds, 1 if it changed, 2 if the packages could not be installed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
pip() { python3 -m pip install -q --disable-pip-version-check --target "$work/p" "$@" >>"$work/log" 2>&1; }
pip "torch==2.13.0" "numpy==2.4.6" "onnx==1.23.2" "onnxscript==0.7.2" "onnxruntime==1.31.1" || { cat "$work/log"; exit 2; }
cd "$work"
PYTHONPATH="$work/p" PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 python3 -W ignore - <<'PY'
import sys
import onnxruntime
import torch
from torch import nn


class Attention(nn.Module):
    def forward(self, q, k, v, keep):
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=keep)


torch.manual_seed(0)
q, k, v = (torch.randn(1, 1, n, 8) for n in (4, 6, 6))
keep = torch.ones(4, 6, dtype=torch.bool)
keep[1] = False
want, given, off = Attention()(q, k, v, keep), (q, k, v, keep), {}
print(f"torch: the masked row holds at most {want[0, 0, 1].abs().max():.2f}")
for opset in (18, 23):
    torch.onnx.export(Attention(), given, "a.onnx", opset_version=opset, dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession("a.onnx")
    named = {entry.name: tensor.numpy() for entry, tensor in zip(session.get_inputs(), given)}
    out = torch.from_numpy(session.run(None, named)[0])[0, 0]
    real = (out - want[0, 0])[[0, 2, 3]].abs().max().item()
    off[opset] = (real, out[1].abs().max().item(), (out[1] - v[0, 0].mean(0)).abs().max().item())
    print(f"opset {opset}: other rows {real:.1e} off, the masked row at most {off[opset][1]:.2f}")
same = max(off[18][0], off[23][0]) < 1e-5 and off[23][1] == 0
sys.exit(0 if same and off[18][1] > 0.1 and off[18][2] < 1e-5 else 1)
PY
