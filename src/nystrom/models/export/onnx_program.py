"""Encoders without Python: as a program of `torch.export`, and as ONNX.

Both take `input_ids` and `attention_mask` (and `token_type_ids` where asked for) of any batch and of any length, up to
that of the position table where there is one, padded or not, and give what the model gives, without a loss. All
attention methods of the library can be exported; `nystrom.models.export.words` says in ONNX what it has no operator
for.

Not in ONNX: the "ridge" and "exact" inverses (it has neither a solver nor singular values), near_far with `num_samples`
(a solver again) or without heavy keys, and weights other than float32. All are refused before any work.

After it is written, an ONNX file is run by onnxruntime on other batches and lengths than it was made with, padding
included, and compared with the model; a file that differs is not kept.
"""

import logging
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nystrom.attention.heads import AttentionHeads
from nystrom.command_options import ExportOptions, taking
from nystrom.evaluation import evaluating
from nystrom.models.classes import model_class
from nystrom.models.configuration import EncoderConfig
from nystrom.models.encoder import EncoderPreTrainedModel
from nystrom.models.export.comparison import OutputEntries, compare, example, longest
from nystrom.models.export.words import IN_WORDS_OF_ONNX
from nystrom.models.files.loading import check_weights
from nystrom.models.heads.pairs import EncoderForPairClassification
from nystrom.onnx_form import for_onnx
from nystrom.progress import Progress
from nystrom.whole_files import check_folder

_INPUTS = ("input_ids", "attention_mask", "token_type_ids")
_OPSETS = range(18, 23)


@dataclass(frozen=True)
class Exported:
    """A file that was written.

    Attributes:
        path: The file; weights of more than 2 GB are in a second one beside it.
        inputs: Names of what it takes.
        outputs: Names of what it gives.
        megabytes: Size of all files.
        runs: Shapes (sequences, tokens) of the runs that compared it with the model; empty where none did.
        difference: The largest difference in these, relative to the largest output.
    """

    path: Path
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    megabytes: float
    runs: tuple[tuple[int, ...], ...]
    difference: float

    def __str__(self) -> str:
        """A summary in a few lines."""
        shapes = ", ".join(" x ".join(map(str, shape)) for shape in self.runs)
        compared = (
            f"differs from the model by {self.difference:.1e} at most, over {shapes}" if shapes else "not compared"
        )
        takes = f"{', '.join(self.inputs)} -> {', '.join(self.outputs)}"
        return f"{self.path}: {self.megabytes:.1f} MB\n{takes}, any batch and length\n{compared}"


def export_program(model: EncoderPreTrainedModel, *, token_type_ids: bool = False) -> torch.export.ExportedProgram:
    """The model as a program of `torch.export`, for any batch and length; `torch.export.save` writes it.

    Args:
        model: An encoder, with a head or without.
        token_type_ids: Also take segments; otherwise all tokens belong to the first.

    Returns:
        A program that gives a tuple of tensors, in the order of the model's output.

    Raises:
        ValueError: Another model, or one with a single position.
    """
    _check_model(model)
    most = longest(model)
    inputs = example(model, 2, 24 if most is None else min(most, 24), 0, 5)
    inputs = inputs if token_type_ids else inputs[:2]
    dynamic = torch.export.Dim.DYNAMIC(min=1)
    # Between batch and length there may be the choices of a question, or the two documents of a pair.
    axes: dict[int, Any] = dict.fromkeys(range(inputs[0].ndim - 1), dynamic)
    if isinstance(model, EncoderForPairClassification):
        axes[1] = None
    axes[inputs[0].ndim - 1] = torch.export.Dim.DYNAMIC(min=1, max=most)
    with evaluating(model), _quiet():
        return torch.export.export(OutputEntries(model).eval(), inputs, dynamic_shapes=tuple(axes for _ in inputs))


def export_onnx(
    model: EncoderPreTrainedModel,
    to: Path,
    *,
    opset: int | None = None,
    token_type_ids: bool = False,
    check: bool = True,
) -> Exported:
    """Write the model as ONNX, for any batch and length.

    Args:
        model: An encoder in float32, with a head or without.
        to: The file, which must not exist yet.
        opset: Version of ONNX, 18 to 22; None is what torch writes by default.
        token_type_ids: Also take segments; otherwise all tokens belong to the first.
        check: Run the file by onnxruntime, and compare it with the model.

    Raises:
        ValueError: A model, dtype, option or opset that cannot be written, or a file that exists already.
        ArithmeticError: The file differs from the model.
    """
    _check_model(model)
    _check_onnx(model, opset, runs=check)
    _check_file(to, ".onnx")
    inputs = _INPUTS if token_type_ids else _INPUTS[:2]
    outputs = _output_names(model)
    with (
        Progress("export", 3 + check, unit="steps") as progress,
        tempfile.TemporaryDirectory(prefix=f".{to.name}-", dir=to.parent) as around,
    ):
        with progress.doing("tracing the model"), for_onnx():
            program = export_program(model, token_type_ids=token_type_ids)
        written = _in_onnx(program, model, progress, opset_version=opset, input_names=inputs, output_names=outputs)
        partial = Path(around) / to.name
        with progress.doing("writing the file"):
            _name_axes(written)
            written.save(partial)
        runs, difference = (), 0.0
        if check:
            with progress.doing("comparing the file with the model"):
                runs, difference = compare(partial, model, inputs)
        megabytes = sum(file.stat().st_size for file in Path(around).iterdir()) / 1e6
        # The weights first, so that the file is complete as soon as it exists.
        for file in sorted(Path(around).iterdir(), key=lambda file: file == partial):
            file.rename(to.parent / file.name)
    return Exported(to, inputs, outputs, megabytes, runs, difference)


def _in_onnx(
    program: torch.export.ExportedProgram, model: EncoderPreTrainedModel, progress: Progress, **asked: Any
) -> torch.onnx.ONNXProgram:
    """The program in the words of ONNX.

    Raises:
        ValueError: It has none for some operation.
    """
    try:
        with _quiet(), progress.doing("translating it to ONNX"):
            if _lacks_words(program):
                # Another trace, as long as the first.
                program = program.run_decompositions(IN_WORDS_OF_ONNX)
            written = torch.onnx.export(program, (), dynamo=True, verbose=False, **asked)
    except torch.onnx.OnnxExporterError as error:
        raise ValueError(
            f"attention {model.config.attention!r} with {model.config.attention_options} cannot be written as ONNX "
            f"({_root(error)}): use other options, or export_program."
        ) from error
    assert written is not None, "torch.onnx.export gives a program where no file is named"
    return written


def _lacks_words(program: torch.export.ExportedProgram) -> bool:
    """Whether some operation has no ONNX form of its own, in the program or in what it calls."""
    graphs = [module.graph for module in program.graph_module.modules() if isinstance(module, torch.fx.GraphModule)]
    return any(node.target in IN_WORDS_OF_ONNX for graph in graphs for node in graph.nodes)


@taking(ExportOptions)
def export(asked: ExportOptions) -> Exported:
    """Write the model of a folder as ONNX, for any batch and length.

    Raises:
        ValueError: A folder that cannot be read, or as for `export_onnx`.
        ArithmeticError: The file differs from the model.
    """
    _check_file(asked.to, ".onnx")
    check_weights(asked.folder)
    config = EncoderConfig.from_pretrained(asked.folder)
    model = model_class(config, asked.folder).from_pretrained(asked.folder)
    return export_onnx(model, asked.to, opset=asked.opset, token_type_ids=asked.token_type_ids, check=asked.check)


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, EncoderPreTrainedModel):
        raise ValueError(f"model is a {type(model).__name__}; expected one of nystrom.models.")
    most = longest(model)
    if most is not None and most < 2:
        raise ValueError(
            "the longest input of the model is 1; expected at least 2: one token leaves no length to vary."
        )


def _check_onnx(model: EncoderPreTrainedModel, opset: int | None, *, runs: bool) -> None:
    if opset is not None and opset not in _OPSETS:
        raise ValueError(
            f"opset is {opset}; expected {_OPSETS[0]} to {_OPSETS[-1]}: torch writes nothing older, and the attention "
            "of newer ones wants a mask for each query in onnxruntime."
        )
    for package in ("onnx", "onnxscript", *(("onnxruntime",) if runs else ())):
        if find_spec(package) is None:
            raise ValueError(f"ONNX needs the package {package}, which is not installed: pip install 'nystrom[onnx]'.")
    if model.dtype != torch.float32:
        raise ValueError(f"the model is in {model.dtype}; expected torch.float32: call model.float() first.")
    # Of the modules rather than the config, whose layers may each have a method of their own.
    for heads in (module for module in model.modules() if isinstance(module, AttentionHeads)):
        options = heads.options
        if getattr(options, "pinv", "iterative") != "iterative":
            raise ValueError(
                f"pinv is {options.pinv!r}, but ONNX can neither solve nor find singular values: take 'iterative', or "
                "export_program."
            )
        if heads.method == "near_far" and options.num_samples:
            raise ValueError(
                f"num_samples is {options.num_samples}, but ONNX cannot solve the equations of near_far's correction: "
                "take 0, or export_program."
            )
        if heads.method == "near_far" and not options.num_heavy:
            raise ValueError(
                "num_heavy is 0, but onnxruntime cannot reshape what near_far then joins to no heavy key: take 1 or "
                "more, or export_program."
            )


def _check_file(to: Path, suffix: str) -> None:
    if to.suffix != suffix:
        raise ValueError(f"to is {to}; expected a file name that ends in {suffix}.")
    for file in (to, to.with_name(f"{to.name}.data")):
        if file.exists():
            raise ValueError(f"{file} exists already: choose another name.")
    check_folder(to.parent)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence what torch logs about itself while it exports: notes on torchvision, and its own deprecated calls."""
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


def _output_names(model: EncoderPreTrainedModel) -> tuple[str, ...]:
    ids, mask, _ = example(model, 1, 2, 0, 0)
    with torch.no_grad(), evaluating(model):
        return tuple(model(ids, attention_mask=mask, output_hidden_states=False, return_dict=True).keys())


def _name_axes(written: torch.onnx.ONNXProgram) -> None:
    """Name the axes of any size, in inputs, outputs and between."""
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


def _root(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
