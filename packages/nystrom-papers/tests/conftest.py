"""The fixtures of the laboratory's tests."""

import importlib.util
from pathlib import Path

SPEC = importlib.util.spec_from_file_location(
    "fixtures_of_the_laboratory", Path(__file__).parents[2] / "nystrom-lab" / "tests" / "conftest.py"
)
laboratory = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(laboratory)

data, pairs, mlm = laboratory.data, laboratory.pairs, laboratory.mlm
drawn, drawn_roughly = laboratory.drawn, laboratory.drawn_roughly
