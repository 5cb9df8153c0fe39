"""A toy method that the steps of CONTRIBUTING add to a copy of the library, and nothing else, keeps the laws."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import nystrom

ROOT = Path(__file__).parents[4]
SUITE = "packages/nystrom/tests/attention/test_every_method.py"
OPTIONS = '''

@dataclass(frozen=True, kw_only=True)
class TemperedOptions(LayerOptions):
    """Options of tempered attention.

    Attributes:
        temperature: Number that scores are divided by.
    """

    temperature: float = 1.0
'''
FUNCTION = '''r"""Softmax attention over a temperature: $\\mathrm{softmax}(c\\, Q K^\\top / T)\\, V$."""

from jaxtyping import Bool, Float, Int
from torch import Tensor

from nystrom.attention.entry import attend
from nystrom.attention.fused import fused_softmax
from nystrom.attention.options import TemperedOptions, documented
from nystrom.shapes import Group, Masks


@documented(TemperedOptions)
def tempered_attention(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h s d"],
    v: Float[Tensor, "b h s e"],
    *,
    temperature: float = 1.0,
    keep: Bool[Tensor, "b n"] | None = None,
    key_keep: Bool[Tensor, "b s"] | None = None,
    query_keep: Bool[Tensor, "b n"] | None = None,
    cu_seqlens: Int[Tensor, " ends"] | None = None,
    group: Group = None,
) -> Float[Tensor, "b h n e"]:
    """Attend by softmax of scores over a temperature.

    Args:
        **usual: Tensors, masks, group and `TemperedOptions`.
    """
    masks, options = Masks(keep, key_keep, query_keep, cu_seqlens), TemperedOptions(temperature=temperature)
    return attend(_tempered, q, k, v, masks, options, group=group)


def _tempered(q, k, v, keep, query_keep, options):
    return fused_softmax(q, k, v, keep=keep, scale=q.shape[-1] ** -0.5 / options.temperature)
'''
ENTRY = """    "tempered": Method(
        summary="softmax over a temperature",
        options=TemperedOptions,
        cost="n s d",
        exact_limit="softmax, where temperature = 1",
        source="none",
    ),
"""
FORMULA = """

def tempered(q: Queries, k: Keys, v: Values, *, temperature: float) -> Out:
    return softmax(q / temperature, k, v)
"""
FORMULA_OF = '        "tempered": lambda q, k, v, *_: reference.tempered(q, k, v, temperature=options.temperature),\n'
# A file that the steps name; the line above which a text goes, "" for the end of the file; and the text.
ADDED = [
    ("attention/options.py", "", OPTIONS),
    ("attention/methods/tempered.py", "", FUNCTION),
    ("attention/registry.py", "    SoftmaxOptions,\n)", "    TemperedOptions,\n"),
    ("attention/registry.py", '    "linear": Method(', ENTRY),
    ("attention/functions.py", "\nFUNCTIONS", "from nystrom.attention.methods.tempered import tempered_attention\n"),
    ("attention/functions.py", '    "linear": linear_attention', '    "tempered": tempered_attention,\n'),
    (SUITE, '    "linear": [{}]', '    "tempered": [{"temperature": 2.0}],\n'),
    (SUITE, '    "linear": ({}, dense_elu)', '    "tempered": ({}, dense_softmax),\n'),
    ("reference.py", "", FORMULA),
    (SUITE, '        "linear": lambda', FORMULA_OF),
]


def test_the_steps_name_each_file():
    steps = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Add an attention method")[2]
    steps = steps.partition("\n## ")[0]
    assert all(f"`{file.replace('tempered.py', '')}`" in steps for file, *_ in ADDED)


@pytest.mark.long
def test_a_method_by_these_steps_alone_keeps_the_laws(tmp_path):
    shutil.copytree(Path(nystrom.__file__).parent, tmp_path / "nystrom", ignore=shutil.ignore_patterns("__pycache__"))
    suite = tmp_path / Path(SUITE).name
    shutil.copyfile(ROOT / SUITE, suite)
    for name in ("conftest.py", "pyproject.toml"):
        shutil.copyfile(ROOT / name, tmp_path / name)
    for file, above, text in ADDED:
        path = suite if file == SUITE else tmp_path / "nystrom" / file
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        assert not above or before.count(above) == 1, (file, above)
        place = before.index(above) if above else len(before)
        path.write_text(before[:place] + text + before[place:], encoding="utf-8")
    # One test or more of each law.
    some = "any_length or padding_changes or rest_of_the_batch or exact_limit or low_precision or the_reference"
    some += " or quadratic or evaluation or gradients_are_right or dynamic_length or bad_inputs"
    laws = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--hypothesis-profile", "few", suite.name]
    ran = subprocess.run(
        [*laws, "-k", f"variants or (tempered and ({some}))", "-m", "not long and not slow"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr
