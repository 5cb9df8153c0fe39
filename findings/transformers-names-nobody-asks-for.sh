#!/usr/bin/env bash
# transformers==5.23.0, torch==2.13.0 (CPU). Seen 2026-11-28.
# Guess: a model that cannot use an attention refuses its name. Seen: DeBERTa, MPNet, Longformer, BigBird and others refuse
# "sdpa", and take the name of an attention that is registered with AttentionInterface, say that they use it, and never call
# it. A misspelled part in attn_implementation={"vison_config": ...} is taken as well, and changes nothing.
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
from transformers import CONFIG_MAPPING, AttentionInterface, AutoModel, CLIPConfig, CLIPModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

calls = []


def mine(*given, **named):
    calls.append(1)
    return sdpa_attention_forward(*given, **named)


AttentionInterface.register("mine", mine)
sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 64}
seen, ids = {}, torch.randint(3, 60, (1, 12))
for family in ("bert", "deberta", "mpnet"):
    config = CONFIG_MAPPING[family](**sizes, pad_token_id=1)
    calls.clear()
    model = AutoModel.from_config(config, attn_implementation="mine").eval()
    model(ids)
    says, times = model.config._attn_implementation, len(calls)
    try:
        sdpa = AutoModel.from_config(config, attn_implementation="sdpa") is not None
    except ValueError:
        sdpa = False
    seen[family] = (says, times, sdpa)
    print(f"{family}: says {says!r}, called {times} times; takes 'sdpa': {sdpa}")
model = CLIPModel(CLIPConfig(text_config=sizes, vision_config=sizes | {"image_size": 8, "patch_size": 4}))
model.set_attn_implementation({"vison_config": "mine"})
calls.clear()
model.get_image_features(torch.randn(1, 3, 8, 8))
print(f"CLIP with 'vison_config': called {len(calls)} times")
wanted = {"bert": ("mine", 1, True), "deberta": ("mine", 0, False), "mpnet": ("mine", 0, False)}
sys.exit(0 if seen == wanted and not calls else 1)
PY
