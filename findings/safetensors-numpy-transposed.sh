#!/usr/bin/env bash
# safetensors==0.8.0, numpy==2.4.6. Seen 2026-11-28.
# Guess: safetensors.numpy.save_file writes an array as it reads. Seen: a transposed array, or one with steps, is written as
# the memory that it views: the file has its shape and other numbers, without an error. safetensors.torch.save_file refuses
# such a tensor. np.ascontiguousarray(array) first.
# Exit status: 0 while the behaviour holds, 1 if it changed, 2 if the packages could not be installed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
pip() { python3 -m pip install -q --disable-pip-version-check --target "$work/p" "$@" >>"$work/log" 2>&1; }
pip "safetensors==0.8.0" "numpy==2.4.6" || { cat "$work/log"; exit 2; }
cd "$work"
PYTHONPATH="$work/p" PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 python3 -W ignore - <<'PY'
import sys
import numpy as np
from safetensors.numpy import load, load_file, save, save_file

a = np.arange(6, dtype=np.float32).reshape(2, 3)
right = {}
for name, array in {"a.T": a.T, "a[:, ::2]": a[:, ::2], "copy of a.T": np.ascontiguousarray(a.T)}.items():
    save_file({"a": array}, "a.safetensors")
    read = load_file("a.safetensors")["a"]
    right[name] = np.array_equal(read, array) and np.array_equal(load(save({"a": array}))["a"], array)
    print(f"{name}: {array.tolist()} is read back as {read.tolist()}")
sys.exit(0 if list(right.values()) == [False, False, True] else 1)
PY
