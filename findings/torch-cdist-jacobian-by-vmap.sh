#!/usr/bin/env bash
# torch==2.13.0 (CPU wheel), seen 2026-11-27.
# torch.func.jacrev through torch.cdist gives a wrong Jacobian without a word where distances are computed directly (compute_mode
# "donot_use_mm_for_euclid_dist", and by default up to 25 rows): entries are off by about 1, in float64. Row by row
# (chunk_size=1, or torch.autograd.functional.jacobian) it is right, and so is the mode that uses a matrix product. So a kernel
# of distances (Laplace, Matern) that is right in every plain test is wrong under vmap of its backward pass.
# Exit status: 0 while the behaviour holds, 1 if it changed, 2 if the packages could not be installed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
pip() { python3 -m pip install -q --disable-pip-version-check --target "$work/p" "$@" >>"$work/log" 2>&1; }
pip "torch==2.13.0" "numpy==2.4.6" || { cat "$work/log"; exit 2; }
cd "$work"
PYTHONPATH="$work/p" PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 python3 -W ignore - <<'PY'
import sys, torch
torch.manual_seed(0)
a, b = (torch.randn(4, 2, dtype=torch.float64) for _ in range(2))
step, off = 1e-6, {}
for mode in ("donot_use_mm_for_euclid_dist", "use_mm_for_euclid_dist", "use_mm_for_euclid_dist_if_necessary"):
    f = lambda x, mode=mode: torch.cdist(a, x, compute_mode=mode)
    true = torch.stack([(f(b + d) - f(b - d)) / (2 * step) for d in (step * torch.eye(8, dtype=b.dtype)).view(8, 4, 2)], -1).view(4, 4, 4, 2)
    off[mode] = [(torch.func.jacrev(f, chunk_size=c)(b) - true).abs().max().item() for c in (None, 1)]
    print(f"{mode}: jacrev {off[mode][0]:.1e}, row by row {off[mode][1]:.1e} from finite differences")
direct, product, default = off.values()
sys.exit(not (direct[0] > 0.1 and default[0] > 0.1 and max(product[0], direct[1], product[1], default[1]) < 1e-5))
PY
