#!/usr/bin/env bash
# transformers==5.23.0, torch==2.13.0 (CPU). Seen 2026-11-30.
# Guess: with feat_extract_norm="layer", where the documentation asks for an attention_mask, a recording has the same states in
# any batch. Seen: so it is in Wav2Vec2, HuBERT and WavLM. In Data2VecAudio and Wav2Vec2Conformer real frames move with the
# padding that a longer neighbour asks for, here with random weights by 26 and 17 %: convolutions after the mask (the stack of
# Data2VecAudio's positions, one in each layer of the Conformer) read padded frames. Give each length a batch of its own.
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
from transformers import AutoModel, Data2VecAudioConfig, HubertConfig, Wav2Vec2Config
from transformers import Wav2Vec2ConformerConfig, WavLMConfig, logging

logging.set_verbosity_error()
sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, feat_extract_norm="layer")
convolutions = dict(conv_dim=(16, 16), conv_kernel=(3, 3), conv_stride=(2, 2), num_feat_extract_layers=2)
positions = dict(num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2)
sound = torch.randn(1, 404, generator=torch.Generator().manual_seed(1))
padded, mask = torch.nn.functional.pad(sound, (0, 200)), (torch.arange(604) < 404).long()[None]
moved = {}
for kind in (Wav2Vec2Config, HubertConfig, WavLMConfig, Data2VecAudioConfig, Wav2Vec2ConformerConfig):
    torch.manual_seed(0)
    model = AutoModel.from_config(kind(**sizes, **convolutions, **positions)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.normal_(std=0.15)  # attention far from uniform
        alone = model(sound, attention_mask=torch.ones_like(mask[:, :404])).last_hidden_state
        states = model(padded, attention_mask=mask).last_hidden_state[:, : alone.shape[1]]
    moved[kind.model_type] = ((states - alone).norm() / alone.norm()).item()
    print(f"{kind.model_type}: {alone.shape[1]} frames are {moved[kind.model_type]:.1%} off with 200 masked samples behind")
held, read = list(moved.values())[:3], list(moved.values())[3:]
sys.exit(0 if max(held) < 1e-5 and min(read) > 0.01 else 1)
PY
