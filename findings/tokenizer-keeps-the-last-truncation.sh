#!/usr/bin/env bash
# transformers==5.23.0, tokenizers==0.23.3. Seen 2026-11-28.
# Guess: truncation and padding of one call are of that call. Seen: they stay in the tokenizer, and save_pretrained writes
# them into tokenizer.json. Whoever reads that file with the library tokenizers, as inference servers do, gets every text cut
# and padded to the length of the last call before saving; AutoTokenizer does not show it. Call the tokenizer once without
# before saving, or no_truncation() and no_padding() after reading.
# Exit status: 0 while the behaviour holds, 1 if it changed, 2 if the packages could not be installed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
pip() { python3 -m pip install -q --disable-pip-version-check --target "$work/p" "$@" >>"$work/log" 2>&1; }
pip "transformers==5.23.0" "tokenizers==0.23.3" "numpy==2.4.6" || { cat "$work/log"; exit 2; }
cd "$work"
PYTHONPATH="$work/p" PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 python3 -W ignore - <<'PY'
import sys
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

words = "a b c d e f g h"
made = Tokenizer(models.WordLevel(unk_token="[UNK]"))
made.pre_tokenizer = pre_tokenizers.Whitespace()
made.train_from_iterator([words], trainers.WordLevelTrainer(special_tokens=["[UNK]", "[PAD]"]))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]", pad_token="[PAD]")
lengths = {}
for name, options in {"truncating": {"truncation": True, "max_length": 4}, "plain": {}}.items():
    tokenizer(words, **options)
    tokenizer.save_pretrained(name)
    whole = PreTrainedTokenizerFast.from_pretrained(name)(words)["input_ids"]
    lengths[name] = len(Tokenizer.from_file(f"{name}/tokenizer.json").encode(words).ids), len(whole)
    print(f"saved after a {name} call: {lengths[name][0]} of 8 words by tokenizers, {lengths[name][1]} by transformers")
sys.exit(0 if lengths == {"truncating": (4, 8), "plain": (8, 8)} else 1)
PY
