"""The engines that run an encoder on a CPU, each a function that loads it and returns a call for the hidden states.

"torch" is exact attention by torch's fused operator in float32, against which all others are compared. An engine of
`nystrom bench engines` runs in a process of its own, so nothing heavy is imported before it is loaded.
"""

from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Float, Int

# The encoder and the tokens, in the folder of a length.
MODEL, TOKENS = "model", "tokens.npy"
# Tokens of a piece, the longest input of most encoders.
PIECE = 512


class EngineJob(NamedTuple):
    """The input of an engine, and its threads.

    Attributes:
        place: Folder of the files that `nystrom_papers.bench.engine_files` makes for one length.
        source: Folder of the model, whose positions are as they were trained.
        threads: Threads of the engine.
    """

    place: Path
    source: Path
    threads: int


EngineCall = Callable[[], "Float[np.ndarray, 'n w']"]


class Engine(NamedTuple):
    """An engine, or a way to use one.

    Attributes:
        load: Loads it.
        packages: Packages that it needs beside torch.
        files: Files that are made for it, the one that it reads last.
        exact: Whether it computes exact attention in float32.
        all_pairs: Whether it holds the scores of all pairs of tokens.
        dtype: In which its linear layers are.
    """

    load: Callable[[EngineJob], EngineCall]
    packages: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    exact: bool = False
    all_pairs: bool = False
    dtype: str = "float32"

    @property
    def version(self) -> str:
        """The engine's own package and its version; "" for torch."""
        return f"{self.packages[-1]} {version(self.packages[-1])}" if self.packages else ""

    def lacks(self) -> str:
        """Why it cannot run here; "" if it can."""
        if missing := [name for name in self.packages if find_spec(name) is None]:
            return f"{' and '.join(missing)} not installed: pip install 'nystrom-papers[engines]'"
        return _lacks_bfloat16() if self.dtype == "bfloat16" else ""


def _lacks_bfloat16() -> str:
    import torch

    capabilities = torch.cpu.get_capabilities()
    if any(there and "bf16" in name for name, there in capabilities.items()):
        return ""
    return "the processor has neither AMX nor AVX512-BF16, without which bfloat16 is slower than float32"


def _tokens(job: EngineJob) -> "Int[np.ndarray, '1 n']":
    import numpy as np

    return np.load(job.place / TOKENS, allow_pickle=False)


def _torch(
    job: EngineJob, *, method: str = "sdpa", selects: bool = False, compiled: bool = False, dtype: str = "float32"
) -> EngineCall:
    import torch

    from nystrom import near_far_sizes
    from nystrom.integrations import set_attention
    from nystrom.integrations.model_loader import load_model

    torch.set_num_threads(job.threads)
    ids, model = torch.from_numpy(_tokens(job)), load_model(job.place / MODEL)[0]
    name, _, number = method.partition("-")
    options: dict[str, Any] = {"num_landmarks": int(number)} if number else {}
    if selects:
        options = near_far_sizes(ids.shape[1])
    if name != "sdpa":
        set_attention(model, name, options)
    model.to(getattr(torch, dtype))
    forward = torch.compile(model, dynamic=False) if compiled else model

    def run() -> "Float[np.ndarray, 'n w']":
        with torch.inference_mode():
            return forward(input_ids=ids).last_hidden_state[0].float().numpy()

    return run


def _pieces(job: EngineJob) -> EngineCall:
    import torch

    from nystrom.integrations.bert_names import longest_input
    from nystrom.integrations.model_loader import load_model

    torch.set_num_threads(job.threads)
    ids, model = torch.from_numpy(_tokens(job)), load_model(job.source)[0]
    model = getattr(model, model.base_model_prefix, model)
    pieces = ids.split(min(PIECE, longest_input(model.config) or PIECE), dim=1)

    def run() -> "Float[np.ndarray, 'n w']":
        with torch.inference_mode():
            return torch.cat([model(input_ids=each).last_hidden_state[0] for each in pieces]).numpy()

    return run


def _onnxruntime(job: EngineJob, *, file: str, mask: bool = False, loops: bool = False) -> EngineCall:
    import numpy as np
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = job.threads
    if loops:
        from nystrom.native import onnx_library

        options.register_custom_ops_library(str(onnx_library()))
    session: Any = onnxruntime.InferenceSession(str(job.place / file), options, providers=["CPUExecutionProvider"])
    feed = {"input_ids": _tokens(job)}
    if mask:
        feed["attention_mask"] = np.ones_like(feed["input_ids"])
    return lambda: session.run(None, feed)[0][0]


def _openvino(job: EngineJob, *, file: str) -> EngineCall:
    import openvino  # pyright: ignore[reportMissingImports]

    how = {"INFERENCE_NUM_THREADS": job.threads, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
    model, ids = openvino.Core().compile_model(job.place / file, "CPU", how), _tokens(job)
    return lambda: model([ids])[0][0]


def _ctranslate2(job: EngineJob, *, file: str, dtype: str) -> EngineCall:
    import ctranslate2  # pyright: ignore[reportMissingImports]
    import numpy as np

    folder, ids = str(job.place / file), _tokens(job).tolist()
    encoder = ctranslate2.Encoder(folder, device="cpu", intra_threads=job.threads, compute_type=dtype)
    return lambda: np.array(encoder.forward_batch(ids).last_hidden_state)[0]


def _onnx(*files: str, dtype: str = "float32", mask: bool = False) -> Engine:
    load = partial(_onnxruntime, file=files[-1], mask=mask)
    all_pairs = files[0] != "flash.onnx"
    return Engine(load, ("onnx", "onnxruntime"), files, dtype == "float32", all_pairs, dtype)


def _by_loops(*files: str, dtype: str = "float32") -> Engine:
    load = partial(_onnxruntime, file=files[-1], mask=True, loops=True)
    return Engine(load, ("onnx", "onnxscript", "onnxruntime"), files, dtype=dtype)


def _ct2(file: str, dtype: str) -> Engine:
    load = partial(_ctranslate2, file=file, dtype=dtype)
    return Engine(load, ("ctranslate2",), (file,), exact=dtype == "float32", dtype=dtype)


EXACT = "torch"
ENGINES: Mapping[str, Engine] = {
    EXACT: Engine(_torch, exact=True),
    "torch-compile": Engine(partial(_torch, compiled=True), exact=True),
    "torch-bf16": Engine(partial(_torch, dtype="bfloat16"), dtype="bfloat16"),
    "onnxruntime": _onnx("plain.onnx"),
    "onnxruntime-mask": _onnx("mask.onnx", mask=True),
    "onnxruntime-flash": _onnx("flash.onnx"),
    "onnxruntime-int8": _onnx("flash.onnx", "int8.onnx", dtype="int8"),
    "openvino": Engine(partial(_openvino, file="openvino.xml"), ("openvino",), ("openvino.xml",), exact=True),
    "ctranslate2": _ct2("ctranslate2", "float32"),
    "ctranslate2-int8": _ct2("ctranslate2-int8", "int8"),
    "near_far": Engine(partial(_torch, method="near_far")),
    "near_far-selects": Engine(partial(_torch, method="near_far", selects=True)),
    "near_far-compile": Engine(partial(_torch, method="near_far", compiled=True)),
    "near_far-onnxruntime": _by_loops("near_far.onnx"),
    "near_far-int8": _by_loops("near_far.onnx", "near_far-int8.onnx", dtype="int8"),
    "nystrom-64": Engine(partial(_torch, method="nystrom-64")),
    "nystrom-onnxruntime": _by_loops("nystrom.onnx"),
    f"pieces-{PIECE}": Engine(_pieces),
}
