"""Commands on models in folders: convert, export."""

from nystrom.command_options import ConvertOptions, ExportOptions
from nystrom_lab.cli.arguments import arguments_of, arguments_with_method, positional


def convert_model(words: list[str]) -> None:
    """Make a Nyströmformer from a BERT or RoBERTa, or give a model more positions."""
    source = positional(ConvertOptions, "source")
    asked = arguments_with_method(ConvertOptions, words, "convert", default="nystrom", flat=True, source=source)
    from nystrom.integrations.convert import convert

    print(convert(**asked))


def export_model(words: list[str]) -> None:
    """Export a model to ONNX, for any batch size and length."""
    asked = arguments_of(ExportOptions, words, "export", folder=positional(ExportOptions, "folder"))
    from nystrom.models.export.onnx_program import export

    print(export(**asked))
