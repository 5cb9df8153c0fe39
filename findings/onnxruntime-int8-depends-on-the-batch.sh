#!/usr/bin/env bash
# onnxruntime==1.31.1, onnx==1.23.2, numpy==2.4.6. Seen 2026-11-30.
# Guess: a model made int8 by quantize_dynamic gives each text of a batch its own numbers, near those of float32. Seen: every
# matrix product has one scale for the activations of the whole batch, padding included. So a text moves with its neighbours:
# here by 1 % beside one of its size and by 10 % beside one ten times as large, in float32 by 0. By the same recipe the states
# of short texts in all-MiniLM-L6-v2 moved by 14 to 21 % beside a document, or padded to 512 tokens (cosine of the mean
# vectors 0.98 to 0.99). Alone and without padding a text has the same numbers always.
# Exit status: 0 while the behaviour holds, 1 if it changed, 2 if the packages could not be installed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
pip() { python3 -m pip install -q --disable-pip-version-check --target "$work/p" "$@" >>"$work/log" 2>&1; }
pip "onnxruntime==1.31.1" "onnx==1.23.2" "numpy==2.4.6" || { cat "$work/log"; exit 2; }
cd "$work"
PYTHONPATH="$work/p" PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1 python3 -W ignore - <<'PY'
import sys
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnxruntime import InferenceSession
from onnxruntime.quantization import QuantType, quantize_dynamic

draw = np.random.default_rng(0)
weights = {name: draw.normal(size=size).astype(np.float32) / 8 for name, size in {"w": (64, 256), "v": (256, 64)}.items()}
nodes = [
    helper.make_node("MatMul", ["x", "w"], ["a"]),
    helper.make_node("Relu", ["a"], ["b"]),
    helper.make_node("MatMul", ["b", "v"], ["y"]),
]
ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", "n", 64]) for name in ("x", "y")]
graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], [numpy_helper.from_array(w, name) for name, w in weights.items()])
onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), "float32.onnx")
quantize_dynamic("float32.onnx", "int8.onnx", weight_type=QuantType.QInt8, per_channel=True, reduce_range=True)

text, other = draw.normal(size=(2, 1, 50, 64)).astype(np.float32)
moved = {}
for file in ("float32.onnx", "int8.onnx"):
    session = InferenceSession(file)
    alone = session.run(None, {"x": text})[0]
    for times in (1, 10):
        beside = session.run(None, {"x": np.concatenate([text, times * other])})[0][:1]
        moved[file, times] = np.linalg.norm(beside - alone) / np.linalg.norm(alone)
        print(f"{file}: beside a text whose activations are {times} times as large, the first is {moved[file, times]:.1%} off")
exact = max(moved["float32.onnx", times] for times in (1, 10))
sys.exit(0 if exact < 1e-6 and moved["int8.onnx", 1] > 0.001 and moved["int8.onnx", 10] > 0.05 else 1)
PY
