#!/usr/bin/env bash
# torch-geometric==2.8.1, torch==2.13.0 (CPU). Seen 2026-11-30.
# Guess: nodes that a mask leaves out get no weight. Seen: PerformerAttention, PolynormerAttention and SGFormerAttention set
# their values to zero and leave their keys in the sum that weights are divided by (SGFormer their number, too). So a graph's
# output depends on the largest graph of its batch: by 14 to 68 % where 30 nodes stand beside 3,000, which GPSConv(attn_type=
# "performer") batches so by itself. GPSConv(attn_type="multihead") gives each graph the same output in any batch.
# Exit status: 0 while the behaviour holds, 1 if it changed, 2 if the packages could not be installed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
pip() { python3 -m pip install -q --disable-pip-version-check --target "$work/p" "$@" >>"$work/log" 2>&1; }
pip "torch==2.13.0" "numpy==2.4.6" "torch-geometric==2.8.1" || { cat "$work/log"; exit 2; }
cd "$work"
PYTHONPATH="$work/p" PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1 python3 -W ignore - <<'PY'
import sys
import torch
from torch_geometric.nn import GPSConv
from torch_geometric.nn.attention import PerformerAttention, PolynormerAttention, SGFormerAttention

torch.manual_seed(0)
off = lambda a, b: ((a - b).norm() / b.norm()).item()
nodes, padded = torch.randn(30, 64), {}
layers = {"performer": PerformerAttention, "polynormer": PolynormerAttention, "sgformer": SGFormerAttention}
with torch.no_grad():
    for name, kind in layers.items():
        layer = kind(64, heads=4).eval()
        alone = layer(nodes[None], mask=torch.ones(1, 30, dtype=torch.bool))
        for size in (60, 3000):  # padded with zeros, as by to_dense_batch
            x, keep = torch.zeros(1, size, 64), torch.arange(size)[None] < 30
            x[0, :30] = nodes
            padded[name, size] = off(layer(x, mask=keep)[:, :30], alone)
        print(f"{name}: 30 nodes are {padded[name, 60]:.1%} off with 30 masked ones, {padded[name, 3000]:.0%} with 2,970")

    no_edges, graph = torch.empty(2, 0, dtype=torch.long), (torch.arange(3030) >= 30).long()
    both, beside = torch.cat([nodes, torch.randn(3000, 64)]), {}
    for kind in ("multihead", "performer"):
        layer = GPSConv(64, None, heads=4, norm=None, attn_type=kind).eval()
        beside[kind] = off(layer(both, no_edges, graph)[:30], layer(nodes, no_edges, graph[:30]))
        print(f"GPSConv, {kind}: a graph of 30 nodes is {beside[kind]:.1%} off beside one of 3,000")
large = [padded[name, 3000] for name in layers]
sys.exit(0 if min(large) > 0.05 and beside["performer"] > 0.005 and beside["multihead"] < 1e-5 else 1)
PY
