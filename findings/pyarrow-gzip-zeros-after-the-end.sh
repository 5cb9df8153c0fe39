#!/usr/bin/env bash
# pyarrow==26.0.1. Seen 2026-11-28.
# CompressedInputStream refuses a .gz file that zeros follow, as tapes and block devices pad files. gzip(1) and Python read
# it: by the manual of gzip ("Using gzip on tapes") bytes behind the end are told only if they are not zeros.
# Exit status: 0 while the behaviour holds, 1 if it changed, 2 if the package could not be installed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m pip install -q --disable-pip-version-check --target "$work/p" "pyarrow==26.0.1" >"$work/log" 2>&1 || { cat "$work/log"; exit 2; }
cd "$work"
printf 'label,text\n1,a\n' | gzip -n >rows.csv.gz
head -c 512 /dev/zero >>rows.csv.gz
gzip -dc rows.csv.gz >rows.csv
PYTHONPATH="$work/p" PYTHONDONTWRITEBYTECODE=1 python3 - <<'PY'
import gzip
import sys
from pathlib import Path

import pyarrow

content = Path("rows.csv").read_bytes()
print(f"gzip(1): {len(content)} bytes; Python's gzip: {len(gzip.open('rows.csv.gz').read())} bytes")
try:
    with pyarrow.CompressedInputStream("rows.csv.gz", "gzip") as stream:
        read = stream.read()
    print(f"pyarrow: {len(read)} bytes")
except OSError as error:
    read = None
    print(f"pyarrow: {error}")
sys.exit(0 if read is None and gzip.open("rows.csv.gz").read() == content else 1)
PY
