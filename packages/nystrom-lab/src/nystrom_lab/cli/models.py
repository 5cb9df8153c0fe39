"""Commands on models in folders: convert, heal, export; and the list of methods."""

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from shutil import get_terminal_size

from nystrom.command_options import ConvertOptions
from nystrom.whole_files import check_fresh, check_new
from nystrom_lab.cli.arguments import UsageError, arguments_with_method, call
from nystrom_lab.config import HealOptions


@dataclass(frozen=True)
class ConvertCommand(ConvertOptions):
    """Put a method into a trained encoder, or give it more positions.

    Attributes:
        calibrate: Text files like those that the model will read: at most four heads, those that make most of the error
            of the hidden states on them, attend exactly.
    """

    _: KW_ONLY
    # Named here, since the options of a class come before those of its base.
    attention: str | None = None
    calibrate: tuple[Path, ...] = ()


@dataclass(frozen=True)
class ExportOptions:
    """Export a saved model to ONNX, for any batch size and length.

    Attributes:
        folder: Folder of the model, with config.json and model.safetensors.
        to: File to write, such as model.onnx; must not exist yet.
        opset: ONNX opset version, 18 to 22; None uses torch's default.
        token_type_ids: Add token_type_ids as an input; otherwise all tokens belong to the first segment.
        loops: Write near_far and nystrom as one operator for each layer, for onnxruntime with the library of
            `nystrom.native.onnx_library`.
        check: Run the file with onnxruntime, and compare it with the model.
    """

    folder: Path
    to: Path
    _: KW_ONLY
    opset: int | None = None
    token_type_ids: bool = False
    loops: bool = False
    check: bool = True


def convert_model(words: list[str]) -> None:
    """Put a method into a trained encoder, or give it more positions."""
    if any(word.partition("=")[0] == "--heal" for word in words):
        raise UsageError("--heal is a command of its own: nystrom heal MODEL --texts FILE --to FOLDER.")
    arguments = arguments_with_method(
        ConvertCommand, words, "convert", default="nystrom", flat=True, positional="source"
    )
    calibrate, options = arguments.pop("calibrate"), ConvertOptions(**arguments)
    check_fresh(options.to)
    if calibrate:
        from nystrom_lab.training.calibrate import convert_calibrated

        print(*convert_calibrated(options, calibrate), sep="\n")
        return
    from nystrom.integrations.convert import convert

    print(convert(options))


def heal_model(words: list[str]) -> None:
    """Convert a model, and let its attention learn from the exact model on your texts."""
    arguments = arguments_with_method(HealOptions, words, "heal", default="nystrom", flat=True, positional="source")
    from nystrom_lab.training.heal import heal

    heal(HealOptions(**arguments))


def export_model(words: list[str]) -> None:
    """Export a model to ONNX, for any batch size and length."""
    options = call(ExportOptions, words, "export", positional="folder")
    folder, to = options.folder, options.to
    check_new(to)
    from nystrom.models.classes import model_class
    from nystrom.models.configuration import EncoderConfig
    from nystrom.models.export.onnx_program import check_file, export_onnx
    from nystrom.models.files.loading import check_weights

    check_file(to)
    check_weights(folder)
    model = model_class(EncoderConfig.from_pretrained(folder), folder).from_pretrained(folder)
    segments, loops, check = options.token_type_ids, options.loops, options.check
    print(export_onnx(model, to, opset=options.opset, token_type_ids=segments, loops=loops, check=check))


def list_methods(words: list[str]) -> None:
    """List the attention methods and their options."""
    from nystrom.attention.registry import METHODS
    from nystrom_lab.report.methods import methods_markdown, methods_text

    def methods(markdown: bool = False) -> None:
        """Print the attention methods: a summary of each, its options, cost, exact limit, capabilities and source.

        Args:
            markdown: Print a Markdown table, without options and capabilities.
        """
        if markdown:
            print(methods_markdown(METHODS), end="")
        else:
            print(methods_text(METHODS, width=get_terminal_size().columns))

    # Without options it runs where what parses them is not installed.
    call(methods, words, "methods") if words else methods()
