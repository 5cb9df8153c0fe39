#!/usr/bin/env bash
# transformers==5.23.0, torch==2.13.0 (CPU). Seen 2026-11-27.
# GemmaModel with use_bidirectional_attention=True: its layers say that they are not causal, and its forward asks for a
# causal mask. What the model computes then depends on the attention and on the padding: by "sdpa" an input without
# padding sees both sides, since the mask is left out; with one padded token in the batch, and by "eager" always, it is
# causal. So a text has other states beside a shorter one than alone, and by "sdpa" than by "eager".
# Exit status: 0 while the behaviour holds, 1 if it changed, 2 if the packages could not be installed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m pip install -q --disable-pip-version-check --target "$work/p" "torch==2.13.0" "transformers==5.23.0" "numpy==2.4.6" >"$work/log" 2>&1 || { cat "$work/log"; exit 2; }
cd "$work"
PYTHONPATH="$work/p" PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 python3 -W ignore - <<'PY'
import sys
import torch
from transformers import GemmaConfig, GemmaModel

sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
config = GemmaConfig(**sizes, intermediate_size=48, vocab_size=64, pad_token_id=0, use_bidirectional_attention=True)
torch.manual_seed(0)
model = GemmaModel(config).eval()
with torch.no_grad():
    for weight in model.parameters():
        if weight.ndim == 2:
            weight.normal_(std=0.15)
ids = torch.randint(3, 60, (2, 20))
later = ids.clone()
later[:, 15] = 3 + (later[:, 15] - 2) % 57
padded = torch.ones_like(ids)
padded[1, 19] = 0

def states(attention, tokens, mask):
    model.set_attn_implementation(attention)
    with torch.no_grad():
        return model(tokens, attention_mask=mask).last_hidden_state[0, :15]

off = lambda a, b: (a - b).abs().max().item()
seen = {
    (attention, name): off(states(attention, later, mask), states(attention, ids, mask))
    for attention in ("sdpa", "eager")
    for name, mask in (("no padding", torch.ones_like(ids)), ("a neighbour padded", padded))
}
for (attention, name), moved in seen.items():
    print(f"{attention}, {name}: tokens 0 to 14 move by {moved:.2f} where token 15 changes")
beside = off(states("sdpa", ids, padded), states("sdpa", ids, torch.ones_like(ids)))
between = off(states("eager", ids, None), states("sdpa", ids, None))
print(f"the same text: {beside:.2f} between alone and beside a padded one (sdpa), {between:.2f} between eager and sdpa")
both = seen.pop(("sdpa", "no padding"))
sys.exit(0 if both > 0.1 and max(seen.values()) < 1e-4 and beside > 0.1 and between > 0.1 else 1)
PY
