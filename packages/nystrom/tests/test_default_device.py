"""A call makes its tensors where its inputs are, whatever torch's default device is; weights alone follow it."""

import ast
from pathlib import Path

import torch
from torch.utils._device import _device_constructors

import nystrom

# Functions that a default device acts on.
MAKERS = {function.__name__ for function in _device_constructors()}


def without_a_device(source):
    """The lines of calls that make a tensor wherever torch's default is, outside of `__init__`."""
    nodes = list(ast.walk(ast.parse(source)))
    starts = [node for node in nodes if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
    built = {inside for start in starts for inside in ast.walk(start)}
    for node in nodes:
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=name), keywords=words):
                # `**` may hold it.
                if name in MAKERS and node not in built and not {"device", None} & {word.arg for word in words}:
                    yield node.lineno


def test_a_call_without_a_device_is_found():
    lines = ["class A:", " def __init__(self): torch.empty(3)", " def f(self, x): torch.ones(3, device=x.device)"]
    assert list(without_a_device("\n".join([*lines, " def g(self): return torch.eye(3)"]))) == [4]
    assert {"eye", "zeros", "tensor", "arange", "rand"} <= MAKERS


def test_each_tensor_of_a_call_names_its_device():
    files = sorted(Path(nystrom.__file__).parent.rglob("*.py"))
    found = [f"{file}:{line}" for file in files for line in without_a_device(file.read_text(encoding="utf-8"))]
    assert len(files) > 50
    assert not found


def test_a_generator_is_on_a_cpu_whatever_the_default():
    # Draws without a device of their own are made where their generator is.
    with torch.device("meta"):
        assert torch.Generator().device.type == "cpu"
