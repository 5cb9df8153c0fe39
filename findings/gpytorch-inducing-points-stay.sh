#!/usr/bin/env bash
# gpytorch==1.15.2, torch==2.13.0 (CPU). Seen 2026-11-30.
# Guess: a kernel computes with the hyperparameters that it has. Seen: in eval() InducingPointKernel (the Nystrom approximation
# of a kernel) keeps the matrix of its inducing points from the first call. After a lengthscale is set, the other factors have
# the new one and that matrix the old one: what comes out is the approximation of no kernel, here 181 % off, without a warning.
# train() and eval() again, or load_state_dict, let the matrix go.
# Exit status: 0 while the behaviour holds, 1 if it changed, 2 if the packages could not be installed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
pip() { python3 -m pip install -q --disable-pip-version-check --target "$work/p" "$@" >>"$work/log" 2>&1; }
pip "torch==2.13.0" "numpy==2.4.6" && pip --no-deps "gpytorch==1.15.2" "linear-operator==0.6.1" "jaxtyping==0.3.11" "wadler-lindig==0.1.8" "scipy==1.17.1" "scikit-learn==1.9.1" "joblib==1.6.0" "cloudpickle==3.1.3" "threadpoolctl==3.8.0" "narwhals==2.28.0" || { cat "$work/log"; exit 2; }
cd "$work"
PYTHONPATH="$work/p" PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1 python3 -W ignore - <<'PY'
import sys
import torch
from gpytorch.kernels import InducingPointKernel, RBFKernel
from gpytorch.likelihoods import GaussianLikelihood

torch.manual_seed(0)
x, inducing = torch.randn(40, 2, dtype=torch.float64), torch.randn(8, 2, dtype=torch.float64)


def kernel_with(lengthscale):
    kernel = InducingPointKernel(RBFKernel(), inducing_points=inducing, likelihood=GaussianLikelihood()).double().eval()
    kernel.base_kernel.lengthscale = lengthscale
    return kernel


with torch.no_grad():
    wanted = kernel_with(3.0)(x, x).to_dense()
    kernel = kernel_with(0.7)
    kernel(x, x).to_dense()
    kernel.base_kernel.lengthscale = 3.0
    off = {"set in eval()": kernel(x, x).to_dense()}
    off["and train(), eval()"] = kernel.train().eval()(x, x).to_dense()
for name, came in off.items():
    off[name] = ((came - wanted).norm() / wanted.norm()).item()
    print(f"lengthscale 3.0 {name}: {off[name]:.1%} from a kernel that was made with it")
stale, fresh = off.values()
sys.exit(0 if stale > 0.1 and fresh < 1e-9 else 1)
PY
