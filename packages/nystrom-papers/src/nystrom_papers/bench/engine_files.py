"""The files that engines read, all from one folder of an encoder: `nystrom_papers.bench.engines` measures them.

Trained positions are stretched to the length (`nystrom.models.positions`), once, so that all engines have the same
weights. Files of onnxruntime are made by torch's older exporter, whose patterns its optimizer knows:

- `plain.onnx` has the tokens alone as input, and `mask.onnx` a mask too, as sentence-transformers exports a model.
  Both hold the scores of all pairs of tokens.
- `flash.onnx` has `com.microsoft.MultiHeadAttention` in place of torch's `scaled_dot_product_attention`. On a CPU
  onnxruntime computes it block by block, where there is no mask.
- `int8.onnx` is `flash.onnx` whose linear layers are in int8: a scale for each channel, and 7 bits of a weight, since
  sums of 8 bits saturate on a processor without VNNI. Other settings err more.
- `near_far.onnx` and `nystrom.onnx` have an operator of ours in place of the attention, with the loops of
  `nystrom.native`, and `near_far-int8.onnx` also has linear layers in int8.
"""

import warnings
from collections.abc import Callable, Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from nystrom.integrations.model_loader import load_model
from nystrom.integrations.position_tables import rows_of, table_of
from nystrom.models.files.folder import copy_tokenizer
from nystrom.models.positions import resize_positions
from nystrom.whole_files import whole_bytes
from nystrom_lab.data.language.encoder_texts import load_encoder, read_batches, read_prose
from nystrom_lab.data.language.tokenizer import load_tokenizer
from nystrom_papers.bench.engine_kinds import MODEL

_OPSET = 17
# More characters than a token has.
_CHARACTERS = 40


def stretch_model(source: Path, length: int, to: Path) -> None:
    """Write the encoder of a folder with positions for inputs of `length` tokens, and its tokenizer.

    Raises:
        ValueError: No encoder of transformers with safetensors.
    """
    model = load_encoder(source)
    # The encoder alone, whichever head the folder has.
    model = getattr(model, model.base_model_prefix, model)
    place = table_of(model)
    if place is not None:
        table: Any = reduce(getattr, place.split("."), model)
        # RoBERTa's table begins with rows that no token has.
        kept = table.num_embeddings - rows_of(table)
        rows = table.weight.data
        resized = resize_positions(rows[kept:], length, how="interpolate")
        table.weight = nn.Parameter(torch.cat([rows[:kept], resized]))
        table.num_embeddings = model.config.max_position_embeddings = kept + length
    model.save_pretrained(to)
    copy_tokenizer(source, to, max_length=length)


def write_tokens(model: Path, length: int, to: Path) -> None:
    """Write `length` tokens of the Python language reference, special tokens included, as the model reads them."""
    encoder, tokenizer = load_encoder(model), load_tokenizer(model)
    # No more than is needed: a tokenizer takes seconds for all of it.
    prose = read_prose((), most=_CHARACTERS * length)
    (batch,) = read_batches(prose, tokenizer, encoder, length=length, num_texts=1)
    with whole_bytes(to) as file:
        np.save(file, batch["input_ids"].numpy())


class StatesAlone(nn.Module):
    """A model whose output is the hidden states of its last layer."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self._model = model

    def forward(
        self, input_ids: Int[Tensor, "b n"], attention_mask: Int[Tensor, "b n"] | None = None
    ) -> Float[Tensor, "b n w"]:
        """The hidden states of these tokens."""
        return self._model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state


def _export(place: Path, to: Path, *inputs: str, **options: Any) -> None:
    tokens = torch.ones(1, 16, dtype=torch.long)
    torch.onnx.export(
        StatesAlone(load_model(place / MODEL)[0]).eval(),
        (tokens,) * len(inputs),
        str(to),
        input_names=[*inputs],
        output_names=["states"],
        opset_version=_OPSET,
        dynamo=False,
        dynamic_axes={name: {1: "n"} for name in (*inputs, "states")},
        **options,
    )


def _plain(place: Path, to: Path) -> None:
    _export(place, to, "input_ids")


def _with_mask(place: Path, to: Path) -> None:
    _export(place, to, "input_ids", "attention_mask")


def _flash(place: Path, to: Path) -> None:
    config = load_model(place / MODEL)[0].config
    heads, width = config.num_attention_heads, config.hidden_size

    def attention(g: Any, query: Any, key: Any, value: Any, *_: Any) -> Any:
        def constant(*numbers: int) -> Any:
            return g.op("Constant", value_t=torch.tensor(numbers))

        # (1, heads, n, width of a head) -> (1, n, width)
        q, k, v = (
            g.op("Reshape", g.op("Transpose", x, perm_i=[0, 2, 1, 3]), constant(1, -1, width))
            for x in (query, key, value)
        )
        out = g.op("com.microsoft::MultiHeadAttention", q, k, v, num_heads_i=heads)
        # Quantization asks for the type, which nothing infers for an operator of onnxruntime's own.
        out.setType(q.type())
        return g.op("Transpose", g.op("Reshape", out, constant(1, -1, heads, width // heads)), perm_i=[0, 2, 1, 3])

    name = "aten::scaled_dot_product_attention"
    # Documented, and missing in the module's list of names.
    older: Any = torch.onnx
    older.register_custom_op_symbolic(name, attention, _OPSET)
    try:
        _export(place, to, "input_ids", custom_opsets={"com.microsoft": 1})
    finally:
        older.unregister_custom_op_symbolic(name, _OPSET)


def _int8(source: str) -> Callable[[Path, Path], None]:
    def quantize(place: Path, to: Path) -> None:
        import onnx
        from onnxruntime.quantization import QuantType, quantize_dynamic

        quantize_dynamic(
            str(place / source),
            str(to),
            weight_type=QuantType.QInt8,
            reduce_range=True,
            per_channel=True,
            op_types_to_quantize=["MatMul"],
            extra_options={"DefaultTensorType": onnx.TensorProto.FLOAT},
        )

    return quantize


def _by_loops(method: str) -> Callable[[Path, Path], None]:
    def export(place: Path, to: Path) -> None:
        from nystrom.integrations import set_attention
        from nystrom.models.export.onnx_program import export_onnx

        model = load_model(place / MODEL)[0]
        set_attention(model, method)
        export_onnx(model, to, loops=True, check=False)

    return export


def _openvino(place: Path, to: Path) -> None:
    import openvino  # pyright: ignore[reportMissingImports]

    model = StatesAlone(load_model(place / MODEL)[0]).eval()
    made = openvino.convert_model(model, example_input=torch.ones(1, 16, dtype=torch.long))
    made.reshape([1, -1])
    openvino.save_model(made, to, compress_to_fp16=False)


def _ctranslate2(quantization: str) -> Callable[[Path, Path], None]:
    def convert(place: Path, to: Path) -> None:
        from ctranslate2.converters import TransformersConverter  # pyright: ignore[reportMissingImports]

        TransformersConverter(str(place / MODEL)).convert(str(to), quantization=quantization)

    return convert


# Each after those that it is made of.
_MAKERS: Mapping[str, Callable[[Path, Path], None]] = {
    "plain.onnx": _plain,
    "mask.onnx": _with_mask,
    "flash.onnx": _flash,
    "int8.onnx": _int8("flash.onnx"),
    "near_far.onnx": _by_loops("near_far"),
    "near_far-int8.onnx": _int8("near_far.onnx"),
    "nystrom.onnx": _by_loops("nystrom"),
    "openvino.xml": _openvino,
    "ctranslate2": _ctranslate2("float32"),
    "ctranslate2-int8": _ctranslate2("int8"),
}
FILES = tuple(_MAKERS)


def make_file(file: str, place: Path) -> None:
    """Make one of `FILES` in the folder of a length, which has the model; raises what its converter raises."""
    with warnings.catch_warnings():
        # Warnings of older exporters about themselves.
        warnings.simplefilter("ignore")
        _MAKERS[file](place, place / file)
