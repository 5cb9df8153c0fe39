#!/usr/bin/env bash
# model2vec==0.10.0, sentence-transformers==6.2.0, torch==2.13.0 (CPU), transformers==5.23.0. Seen 2026-11-30.
# Guess: a folder of model2vec gives a text one vector, of its tokens up to max_length (512). Seen: StaticModel.encode first
# cuts the text to 512 times as many characters as the median token has, blanks included: of 2,000 short words it reads 409.
# SentenceTransformer(folder) reads 512 of them, while its max_seq_length says inf, and averages the vector of the unknown
# token, which StaticModel leaves out. So the two differ on long texts, and on unknown words. StaticModel.encode(...,
# max_length=None) reads all.
# Exit status: 0 while the behaviour holds, 1 if it changed, 2 if the packages could not be installed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
pip() { python3 -m pip install -q --disable-pip-version-check --target "$work/p" "$@" >>"$work/log" 2>&1; }
pip "torch==2.13.0" "transformers==5.23.0" "numpy==2.4.6" && pip --no-deps "model2vec==0.10.0" "sentence-transformers==6.2.0" "joblib==1.6.0" "cloudpickle==3.1.3" "scipy==1.17.1" "scikit-learn==1.9.1" "threadpoolctl==3.8.0" "narwhals==2.28.0" || { cat "$work/log"; exit 2; }
cd "$work"
PYTHONPATH="$work/p" PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 python3 -W ignore - <<'PY'
import logging
import sys

import numpy as np
from model2vec import StaticModel
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer, models, pre_tokenizers

logging.disable()
words = [f"w{i:03d}" for i in range(200)]
tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["[UNK]", *words])}, unk_token="[UNK]"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
draw = np.random.default_rng(0)
StaticModel(draw.normal(size=(201, 16)).astype(np.float32), tokenizer).save_pretrained("folder")
static, sentence = StaticModel.from_pretrained("folder"), SentenceTransformer("folder", device="cpu")

text = list(draw.choice(words, 2000))
vectors = {"StaticModel": static.encode([" ".join(text)])[0], "SentenceTransformer": sentence.encode([" ".join(text)])[0]}
read = {}
for name, vector in vectors.items():
    means = [static.encode([" ".join(text[:n])], max_length=None)[0] for n in range(1, 601)]
    read[name] = 1 + int(np.argmin([np.linalg.norm(vector - mean) for mean in means]))
    print(f"{name}: the vector of 2,000 words is that of the first {read[name]}")
print("max_seq_length of SentenceTransformer:", sentence.max_seq_length)
unknown = [f"w001 {other}" for other in ("w002", "other")]
apart = np.linalg.norm(static.encode(unknown) - sentence.encode(unknown), axis=1)
print(f"two words, both known: {apart[0]:.1e} apart, one unknown: {apart[1]:.1e}")
same = read == {"StaticModel": 409, "SentenceTransformer": 512} and sentence.max_seq_length == float("inf")
sys.exit(0 if same and apart[0] < 1e-6 and apart[1] > 0.1 else 1)
PY
