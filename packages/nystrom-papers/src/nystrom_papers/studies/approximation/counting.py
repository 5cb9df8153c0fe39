"""Operation and memory counts of one call, which are the same on every machine.

**Multiplications** are those of matrix products, fused attention, convolutions, distances and linear systems, forward
and, where the call has one, backward. torch's `FlopCounterMode` counts two operations for each and lacks some of these;
their formulas are here. Elementwise arithmetic and sums (exponentials, scalings) and decompositions (singular values,
eigenvalues) are not counted. The work actually done is counted: a convolution that is computed as a product with a
banded matrix counts as that product, zeros included.

**Stored numbers** are the peak of what the call holds at one time beyond its inputs, the result included, in numbers
of one dtype; masks and indices count by their bytes.
"""

from collections.abc import Callable, Sequence
from math import prod

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from nystrom_lab.measure.peak import peak_bytes


def _product(a: Sequence[int], b: Sequence[int], **_: object) -> int:
    """Operations of (.., n, k) times (.., k, s) or (k,): 2 n k s for each matrix of the batch."""
    return 2 * prod(a) * (b[-1] if len(b) > 1 else 1)


def _added_product(_: Sequence[int], a: Sequence[int], b: Sequence[int], *rest: object, **more: object) -> int:
    return _product(a, b)


def _attention(q: Sequence[int], k: Sequence[int], v: Sequence[int], *rest: object, **more: object) -> int:
    return 2 * prod(q[:-1]) * k[-2] * (q[-1] + v[-1])


def _attention_backward(
    _: Sequence[int], q: Sequence[int], k: Sequence[int], v: Sequence[int], *rest: object, **more: object
) -> int:
    """The scores again, then the gradients of weights and values (e wide) and of queries and keys (d wide)."""
    return 2 * prod(q[:-1]) * k[-2] * (3 * q[-1] + 2 * v[-1])


def _distances(q: Sequence[int], k: Sequence[int], *rest: object, **more: object) -> int:
    return 2 * prod(q) * k[-2]


def _distances_backward(_: Sequence[int], q: Sequence[int], k: Sequence[int], *rest: object, **more: object) -> int:
    """The gradient of one set of points; that of the other is a second call."""
    return 2 * prod(q) * k[-2]


def _linear_system(a: Sequence[int], b: Sequence[int], **more: object) -> int:
    """LU decomposition, m^3 / 3, and two triangular systems, m^2 for each right-hand side."""
    m, vectors = a[-1], tuple(b) == tuple(a[:-1])
    batch = torch.broadcast_shapes(a[:-2], b[:-1] if vectors else b[:-2])
    return 2 * prod(batch) * (m**3 // 3 + m * m * (1 if vectors else b[-1]))


_CPU = torch.device("cpu")
_aten = torch.ops.aten
_FORMULAS = {
    _aten.mv: _product,
    _aten.dot: _product,
    _aten.addmv: _added_product,
    _aten.addmm_: _added_product,
    _aten.baddbmm_: _added_product,
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    _aten._cdist_forward: _distances,
    _aten._cdist_backward: _distances_backward,
    _aten._linalg_solve_ex: _linear_system,
}
# Products and solvers that would count as zero.
_WITHOUT_FORMULA = {
    _aten.linalg_inv_ex, _aten.linalg_solve_triangular, _aten.triangular_solve, _aten.linalg_lu_solve, _aten.lu_solve,
    _aten.cholesky_solve, _aten.cholesky_inverse, _aten.linalg_lstsq, _aten.addbmm,
}  # fmt: skip


def count_multiplications(call: Callable[[], object]) -> int:
    """Multiplications of one call; only the shapes of its tensors matter, not their values.

    Raises:
        ValueError: It runs an operator without a known count: one outside of torch, such as a Triton kernel, or an
            inversion or solver without a formula here.
    """
    with FlopCounterMode(display=False, custom_mapping=_FORMULAS) as counter, _KnownOperators():
        call()
    return counter.get_total_flops() // 2


def count_stored_numbers(
    call: Callable[[], object], *, dtype: torch.dtype = torch.float32, device: torch.device = _CPU
) -> int:
    """The peak count of numbers of a dtype that one call holds, beyond what was allocated before."""
    return peak_bytes(call, device) // dtype.itemsize


class _KnownOperators(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace not in ("aten", "prim", "prims", "profiler"):
            raise ValueError(
                f"The call runs the operator {func.name()}, whose multiplications are not known: count the same "
                "computation in torch's own operators, such as backend='torch'."
            )
        if func.overloadpacket in _WITHOUT_FORMULA:
            raise ValueError(
                f"The call runs {func.name()}, whose multiplications have no formula here: solve the system by "
                "torch.linalg.solve, or count it by hand."
            )
        return func(*args, **(kwargs or {}))
