#!/usr/bin/env bash
# tabpfn==9.2.0, torch==2.13.0 (CPU). Seen 2026-11-29.
# `import tabpfn` puts modules of its old names, such as tabpfn.model.loading, into sys.modules. Any look at one of their
# attributes warns that the old name is deprecated, also where nobody imports it: the standard library's
# `inspect.getmodule` looks at the file of every module for code that belongs to none of those it knows, and torch calls
# it where it registers operators. A program that makes warnings errors, as test suites do, then ends in torch or inspect.
# Exit status: 0 while the behaviour holds, 1 if it changed, 2 if the packages could not be installed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m pip install -q --disable-pip-version-check --target "$work/p" "torch==2.13.0" "tabpfn==9.2.0" >"$work/log" 2>&1 || { cat "$work/log"; exit 2; }
cd "$work"
PYTHONPATH="$work/p" PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1 python3 -W ignore - <<'PY'
import inspect
import sys
import warnings


def warned():
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        # The module of code whose file is that of no module, such as that of a notebook's cell.
        inspect.getmodule(inspect.currentframe(), "cell.py")
    return [each for each in told if issubclass(each.category, DeprecationWarning) and "tabpfn" in str(each.message)]


import torch

before = warned()
import tabpfn

after = warned()
print(f"warnings of inspect.getmodule: {len(before)} before import tabpfn, {len(after)} after it")
if after:
    print(after[0].message)
sys.exit(0 if not before and after else 1)
PY
