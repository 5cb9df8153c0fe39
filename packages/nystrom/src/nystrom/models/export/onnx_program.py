"""Export of encoders, as a `torch.export` program and as ONNX.

Both take `input_ids` and `attention_mask` (and, if requested, `token_type_ids`) of any batch size and length, up to
that of the position table if there is one, padded or not, and return the model's outputs, without a loss. All attention
methods of the library can be exported; `nystrom.models.export.words` rewrites operations that ONNX lacks.

Not in ONNX: the "ridge" and "exact" inverses (it has neither a solver nor singular values), near_far with
`num_selected` or without heavy keys, except with loops, and weights other than float32. All of these raise before any
work is done.

After writing, onnxruntime runs the file on batch sizes and lengths other than those of the export, with padding, and
the results are compared with the model; a file that differs is not kept.
"""

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn
from transformers import PreTrainedModel

from nystrom.attention.onnx_operator import DOMAIN, OPERATORS, check_operator, onnx_loops
from nystrom.attention.shared_graph import shared_graphs
from nystrom.evaluation import evaluating
from nystrom.landmarks import for_onnx
from nystrom.models.export.comparison import OutputEntries, compare, example, longest, method_of, methods_of
from nystrom.models.export.shared_graphs import put_in
from nystrom.models.export.words import put_into_words
from nystrom.models.heads.pairs import EncoderForPairClassification
from nystrom.progress import Progress
from nystrom.temporary import temporary_folder
from nystrom.whole_files import check_folder, check_new, put_new

_INPUTS = ("input_ids", "attention_mask", "token_type_ids")
_OPSETS = range(18, 23)


@dataclass(frozen=True)
class Exported:
    """An exported file."""

    path: Path  # The file; weights of more than 2 GB are in a second one beside it
    inputs: tuple[str, ...]  # Names of its inputs
    outputs: tuple[str, ...]  # Names of its outputs
    megabytes: float  # Size of all files
    # Shapes (sequences, tokens) of the runs that compared it with the model; empty if it was not compared
    runs: tuple[tuple[int, ...], ...]
    difference: float  # The largest difference in these, relative to the largest output

    def __str__(self) -> str:
        """A summary in a few lines."""
        shapes = ", ".join(" x ".join(map(str, shape)) for shape in self.runs)
        compared = (
            f"differs from the model by {self.difference:.1e} at most, over {shapes}" if shapes else "not compared"
        )
        takes = f"{', '.join(self.inputs)} -> {', '.join(self.outputs)}"
        return f"{self.path}: {self.megabytes:.1f} MB\n{takes}, any batch and length\n{compared}"


def export_program(model: PreTrainedModel, *, token_type_ids: bool = False) -> torch.export.ExportedProgram:
    """Export the model with `torch.export`, for any batch size and length; `torch.export.save` writes it.

    Args:
        model: An encoder of `nystrom.models` or of transformers, with a head or without.
        token_type_ids: Add token_type_ids as an input; otherwise all tokens belong to the first segment.

    Returns:
        A program that returns a tuple of tensors, in the order of the model's output.

    Raises:
        ValueError: Not an encoder of tokens, or one with a single position.
    """
    _check_model(model)
    limit = longest(model)
    inputs = example(model, 2, 24 if limit is None else min(limit, 24), 0, 5)
    inputs = inputs if token_type_ids else inputs[:2]
    dynamic = torch.export.Dim.DYNAMIC(min=1)
    # Between batch and length there may be the choices of a question, or the two documents of a pair.
    axes: dict[int, Any] = dict.fromkeys(range(inputs[0].ndim - 1), dynamic)
    if isinstance(model, EncoderForPairClassification):
        axes[1] = None
    axes[inputs[0].ndim - 1] = torch.export.Dim.DYNAMIC(min=1, max=limit)
    with evaluating(model), _quiet():
        return torch.export.export(OutputEntries(model).eval(), inputs, dynamic_shapes=tuple(axes for _ in inputs))


def export_onnx(
    model: PreTrainedModel,
    to: Path,
    *,
    opset: int | None = None,
    token_type_ids: bool = False,
    loops: bool = False,
    check: bool = True,
) -> Exported:
    """Export the model to ONNX, for any batch size and length.

    Args:
        model: An encoder in float32, of `nystrom.models` or of transformers, with a head or without.
        to: The file, which must not exist yet.
        opset: ONNX opset version, 18 to 22; None uses torch's default.
        token_type_ids: Add token_type_ids as an input; otherwise all tokens belong to the first segment.
        loops: Write near_far and nystrom as one operator for each layer, which onnxruntime runs as fast as torch does
            by the loops of `nystrom.native`. Only a session that has registered `nystrom.native.onnx_library()` can
            load the file.
        check: Run the file with onnxruntime, and compare it with the model.

    Raises:
        ValueError: A model, dtype, option or opset that cannot be exported, or a file that already exists, also where
            it came while this one was made.
        ArithmeticError: The file differs from the model.
    """
    _check_model(model)
    _check_onnx(model, opset, runs=check, loops=loops)
    check_file(to)
    inputs = _INPUTS if token_type_ids else _INPUTS[:2]
    outputs = _output_names(model)
    with (
        Progress("export", 3 + check, unit="steps") as progress,
        temporary_folder(to) as around,
    ):

        def write(program: torch.export.ExportedProgram, **names: Any) -> torch.onnx.ONNXProgram:
            return _in_onnx(program, model, opset_version=opset, **names)

        with for_onnx(), onnx_loops() if loops else nullcontext():
            with progress.doing("tracing the model"), shared_graphs() as computations:
                program = export_program(model, token_type_ids=token_type_ids)
            with progress.doing("translating it to ONNX"), _quiet():
                written = write(program, input_names=inputs, output_names=outputs)
                put_in(written, computations, write)
        if loops and all(node.domain != DOMAIN for node in written.model.graph):
            _refuse_loops()
        partial = around / to.name
        with progress.doing("writing the file"):
            _name_axes(written)
            _shape_once(written)
            written.save(partial)
        runs, difference = (), 0.0
        if check:
            with progress.doing("comparing the file with the model"):
                runs, difference = compare(partial, model, inputs, loops=loops)
        megabytes = sum(file.stat().st_size for file in around.iterdir()) / 1e6
        put: list[Path] = []
        try:
            # The weights first, so that the file is complete as soon as it exists.
            for file in sorted(around.iterdir(), key=lambda file: file == partial):
                put_new(file, to.parent / file.name)
                put.append(to.parent / file.name)
        except (ValueError, OSError):
            # Weights without their file.
            for file in put:
                file.unlink()
            raise
    return Exported(to, inputs, outputs, megabytes, runs, difference)


def _in_onnx(program: torch.export.ExportedProgram, model: PreTrainedModel, **options: Any) -> torch.onnx.ONNXProgram:
    """The program in the words of ONNX; ValueError if it has none for some operation."""
    try:
        put_into_words(program)
        written = torch.onnx.export(program, (), dynamo=True, verbose=False, **options)
    except torch.onnx.OnnxExporterError as error:
        raise ValueError(
            f"attention {method_of(model)!r} with {_options_of(model)} cannot be written as ONNX "
            f"({_root(error)}): use other options, or export_program."
        ) from error
    assert written is not None, "torch.onnx.export gives a program where no file is named"
    return written


def _options_of(model: PreTrainedModel) -> Mapping[str, Any]:
    return getattr(model.config, "attention_options", None) or {}


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, PreTrainedModel) or model.main_input_name != "input_ids":
        raise ValueError(
            f"model is a {type(model).__name__}; expected an encoder of tokens, of nystrom.models or transformers."
        )
    limit = longest(model)
    if limit is not None and limit < 2:
        raise ValueError(
            "the longest input of the model is 1; expected at least 2: one token leaves no length to vary."
        )


def _check_onnx(model: PreTrainedModel, opset: int | None, *, runs: bool, loops: bool) -> None:
    if opset is not None and opset not in _OPSETS:
        raise ValueError(
            f"opset is {opset}; expected {_OPSETS[0]} to {_OPSETS[-1]}: torch writes nothing older, and the attention "
            "of newer ones needs a mask for each query in onnxruntime."
        )
    for package in ("onnx", "onnxscript", *(("onnxruntime",) if runs else ())):
        if find_spec(package) is None:
            raise ValueError(f"ONNX needs the package {package}, which is not installed: pip install 'nystrom[onnx]'.")
    if model.dtype != torch.float32:
        raise ValueError(f"the model is in {model.dtype}; expected torch.float32: call model.float() first.")
    methods = methods_of(model)
    if loops and not any(method in OPERATORS for method, _ in methods):
        _refuse_loops()
    for method, options in methods:
        if loops and method in OPERATORS:
            check_operator(method, options)
        if getattr(options, "pinv", "iterative") != "iterative":
            raise ValueError(
                f"pinv is {options.pinv!r}, but ONNX has neither a solver nor singular values: use 'iterative', or "
                "export_program."
            )
        if loops or method != "near_far":
            continue
        if options.num_selected:
            raise ValueError(
                f"num_selected is {options.num_selected}, whose choice is not in ONNX: use 0, loops=True (--loops), or "
                "export_program."
            )
        if not options.num_heavy:
            raise ValueError(
                "num_heavy is 0, but onnxruntime cannot reshape near_far's empty set of heavy keys: use 1 or "
                "more, loops=True (--loops), or export_program."
            )


def _refuse_loops() -> NoReturn:
    raise ValueError(
        f"loops is True, but no layer of the model has self-attention by {' or '.join(OPERATORS)}: leave it out."
    )


def check_file(to: Path) -> None:
    """Raise ValueError for a file that cannot be written, or exists."""
    if to.suffix != ".onnx":
        raise ValueError(f"to is {to}; expected a file name that ends in .onnx.")
    for file in (to, to.with_name(f"{to.name}.data")):
        check_new(file)
    check_folder(to.parent)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's own messages during export: notes on torchvision, and its deprecated calls."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnx_ir", "onnxscript")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def _output_names(model: PreTrainedModel) -> tuple[str, ...]:
    ids, mask, _ = example(model, 1, 2, 0, 0)
    with torch.no_grad(), evaluating(model):
        outputs = model(ids, attention_mask=mask, output_hidden_states=False, return_dict=True)
    return tuple(name for name, value in outputs.items() if isinstance(value, torch.Tensor))


def _name_axes(written: torch.onnx.ONNXProgram) -> None:
    """Name the dynamic axes, in inputs, outputs and intermediate values."""
    graph = written.model.graph
    names: dict[str | None, str] = {}
    for value in graph.inputs:
        assert value.shape is not None, "an input has a shape"
        axes = ("batch", "length") if len(value.shape) == 2 else ("batch", "choices", "length")
        # Each input may have its own symbols for the same axis.
        names |= {dim.value: name for dim, name in zip(value.shape, axes, strict=True) if not isinstance(dim, int)}
    for value in (*graph.inputs, *(output for node in graph for output in node.outputs)):
        shape = value.shape
        for axis, dim in enumerate(() if shape is None else shape):
            if shape is not None and not isinstance(dim, int) and dim.value in names:
                shape[axis] = names[dim.value]


def _shape_once(written: torch.onnx.ONNXProgram) -> None:
    """Leave the shape of each weight to the weight itself.

    onnxruntime's `quantize_dynamic` transposes weights, finds their shapes again, and refuses those that were written
    a second time, among the intermediate values.
    """
    for value in written.model.graph.initializers.values():
        value.shape = value.type = None


def _root(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
