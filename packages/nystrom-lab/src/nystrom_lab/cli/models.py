"""Commands on models in folders: convert, export."""

import inspect
from dataclasses import KW_ONLY, dataclass, fields
from pathlib import Path

from nystrom.command_options import ConvertOptions
from nystrom.whole_files import check_fresh, check_new
from nystrom_lab.cli.arguments import arguments_of, arguments_with_method
from nystrom_lab.config import HealOptions


@dataclass(frozen=True)
class ConvertCommand(HealOptions):
    """Put a method into a trained encoder, give it more positions, heal it on your texts.

    Attributes:
        calibrate: Text files like those that the model will read: at most four heads, those that make most of the error
            of the hidden states on them, attend exactly.
    """

    _: KW_ONLY
    calibrate: tuple[Path, ...] = ()


@dataclass(frozen=True)
class ExportOptions:
    """Export a saved model to ONNX, for any batch size and length.

    Attributes:
        folder: Folder of the model, with config.json and model.safetensors.
        to: File to write, such as model.onnx; must not exist yet.
        opset: ONNX opset version, 18 to 22; None uses torch's default.
        token_type_ids: Add token_type_ids as an input; otherwise all tokens belong to the first segment.
        check: Run the file with onnxruntime, and compare it with the model.
    """

    folder: Path
    to: Path
    _: KW_ONLY
    opset: int | None = None
    token_type_ids: bool = False
    check: bool = True


def convert_model(words: list[str]) -> None:
    """Put a method into a trained encoder, give it more positions, heal it on your texts."""
    from nystrom_lab.training.heal import heal

    asked = arguments_with_method(
        ConvertCommand, words, "convert", default="nystrom", flat=True, positional="source", names={"texts": "heal"}
    )
    calibrate = asked.pop("calibrate")
    if calibrate and asked["texts"]:
        raise ValueError(
            "--calibrate chooses exact heads, and --heal trains the attention: convert with --calibrate first, then "
            "heal that folder."
        )
    if asked["texts"]:
        heal(**asked)
        return
    plain = {name: asked.pop(name) for name in [entry.name for entry in fields(ConvertOptions)]}
    for name, value in asked.items():
        if value != inspect.signature(heal).parameters[name].default:
            raise ValueError(
                f"--{name.replace('_', '-')} is {value}, but nothing is healed: name texts with --heal, or leave it "
                "out."
            )
    check_fresh(plain["to"])
    if calibrate:
        from nystrom_lab.training.calibrate import convert_calibrated

        print(*convert_calibrated(ConvertOptions(**plain), calibrate), sep="\n")
        return
    from nystrom.integrations.convert import convert

    print(convert(**plain))


def export_model(words: list[str]) -> None:
    """Export a model to ONNX, for any batch size and length."""
    asked = arguments_of(ExportOptions, words, "export", positional="folder")
    folder = asked.pop("folder")
    check_new(asked["to"])
    from nystrom.models.classes import model_class
    from nystrom.models.configuration import EncoderConfig
    from nystrom.models.export.onnx_program import check_file, export_onnx
    from nystrom.models.files.loading import check_weights

    check_file(asked["to"])
    check_weights(folder)
    model = model_class(EncoderConfig.from_pretrained(folder), folder).from_pretrained(folder)
    print(export_onnx(model, **asked))
