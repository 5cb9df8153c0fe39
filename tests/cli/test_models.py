"""The commands on models, whose signatures are declared without torch."""

import inspect

import pytest

from nystrom.cli import models
from nystrom.cli.main import main
from nystrom.integrations.convert import convert
from nystrom.models.export.onnx_program import export


@pytest.mark.parametrize(("declared", "done"), [(models.convert, convert), (models.export, export)])
def test_what_the_command_line_declares_is_what_the_function_takes(declared, done):
    assert inspect.signature(declared).parameters == inspect.signature(done).parameters
    assert inspect.getdoc(declared) == inspect.getdoc(done)


@pytest.mark.parametrize("words", [("export", "nowhere", "--to", "m.onnx"), ("convert", "nowhere", "--to", "made")])
def test_a_folder_that_is_not_there_is_named(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([*words]) == 2
    assert capsys.readouterr().err.startswith("nystrom: model is nowhere, which is no folder")


def test_a_text_and_a_file_exclude_each_other(tmp_path):
    for given in ({}, {"text": "a [MASK]", "file": tmp_path}):
        with pytest.raises(ValueError, match="either a text or --file"):
            models.fill_mask(model="none", **given)
