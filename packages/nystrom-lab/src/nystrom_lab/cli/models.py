"""Commands on models in folders: convert, export."""

from nystrom.command_options import ConvertOptions, ExportOptions
from nystrom_lab.cli.arguments import arguments_of, positional
from nystrom_lab.cli.method_options import arguments_with_method


def convert_model(words: list[str]) -> None:
    """Convert a BERT or RoBERTa, or lengthen a model."""
    source = positional(ConvertOptions, "source")
    asked = arguments_with_method(ConvertOptions, words, "convert", default="nystrom", flat=True, source=source)
    from nystrom.integrations.convert import convert

    print(convert(**asked))


def export_model(words: list[str]) -> None:
    """Write a model as ONNX."""
    asked = arguments_of(ExportOptions, words, "export", folder=positional(ExportOptions, "folder"))
    from nystrom.models.export.onnx_program import export

    print(export(**asked))
