"""The private names of torch and transformers that the library uses; a new version of either may move any of them."""

import ast
from pathlib import Path

import pytest
from transformers import PreTrainedModel

import nystrom
from nystrom import private_torch

SOURCE = Path(nystrom.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
NAMED_TUPLES = {"_asdict", "_fields", "_make", "_replace"}
# Attributes of torch's modules, whose hooks and buffers have no public reader.
OF_MODULES = {
    *("_modules", "_non_persistent_buffers_set"),
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
}
OF_TRANSFORMERS = {
    # The name of a model's attention in its configuration, with and without the names of its parts.
    *("_attn_implementation", "_attn_implementation_internal"),
    # The function that makes a model with a method.
    "_from_config",
    # Masks before they are made, and the hidden states that a call asked for.
    *("_preprocess_mask_arguments", "_active_collector"),
}
# Names that our models set there, and read from others.
DECLARED = ("_can_set_attn_implementation", "_init_weights", "_keys_to_ignore_on_load_unexpected", "_no_split_modules")


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def of_torch(source):
    """Private names in paths that begin with torch."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.ImportFrom(module=str(module), names=names) if module.partition(".")[0] == "torch":
                paths = [f"{module}.{each.name}" for each in names]
            case ast.Import(names=names):
                paths = [each.name for each in names if each.name.partition(".")[0] == "torch"]
            case ast.Attribute(attr=name) if is_private(name):
                path = ast.unparse(node)
                paths = [path] if path.startswith(("torch.", "forward_ad.", "autograd.")) else []
            case _:
                continue
        yield from (path for path in paths if any(map(is_private, path.split("."))))


def of_others(trees):
    """Private attributes, imports and arguments of calls that no file defines."""
    nodes = [node for tree in trees for node in ast.walk(tree)]
    ours = set(NAMED_TUPLES)
    for node in nodes:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                ours.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                ours.add(name)
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                ours.add(name)
    for node in nodes:
        match node:
            case ast.Attribute(attr=name) if is_private(name) and name not in ours:
                yield name
            case ast.ImportFrom(module=str(module), names=names) if not module.startswith("nystrom"):
                yield from (each.name for each in names if is_private(each.name))


@pytest.mark.parametrize(
    "line",
    [
        "from torch._subclasses import FakeTensor",
        "from torch.nn.modules.module import _global",
        "import torch._dynamo",
        "x = torch._C._name()",
        "forward_ad._current_level",
    ],
)
def test_a_private_name_of_torch_is_found(line):
    assert list(of_torch(line))
    assert not list(of_torch("from torch import nn\nx = torch.nn.functional.pad(y._z)"))


def test_one_file_has_the_private_names_of_torch():
    found = {file.relative_to(SOURCE).as_posix() for file in FILES if any(of_torch(file.read_text(encoding="utf-8")))}
    assert found == {"private_torch.py"}
    assert {name for name in vars(private_torch) if name in private_torch.__all__} == set(private_torch.__all__)


def test_private_names_of_other_packages_are_those_of_the_list():
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in FILES if file.name != "private_torch.py"]
    assert set(of_others(trees)) == OF_MODULES | OF_TRANSFORMERS
    assert all(hasattr(PreTrainedModel, name) for name in DECLARED)
