"""The m x m matrix of the landmarks, the roots that scale it and its inverse, and their gradients, in plain torch.

`few` is that of `LandmarkPlan`; None if no sequence is short. A `gamma` below 0 means softmax.
"""

import torch
from torch import Tensor

from nystrom.kernels import gaussian_kernel


def matrix_of(table: Tensor, few: Tensor | None, m: int, scale: float, gamma: float) -> tuple[Tensor, Tensor | None]:
    """The matrix to invert, and the roots that scale it (only for the Gaussian kernel).

    With softmax, the matrix is the identity for short sequences.
    """
    if gamma >= 0:
        ridged = _ridged(table, scale, gamma)
        root = ridged.sum(-1).rsqrt()
        return root[..., :, None] * ridged * root[..., None, :], root
    a = (scale * (table[:, :, :m] @ table[:, :, m:].mT)).softmax(-1)
    if few is not None:
        a = torch.where((few > 0)[:, None, None, None], torch.eye(m, dtype=a.dtype, device=a.device), a)
    return a, None


def _ridged(table: Tensor, scale: float, gamma: float) -> Tensor:
    eye = torch.eye(table.shape[2], dtype=table.dtype, device=table.device)
    table = _around_mean(table)
    return gaussian_kernel(table, table, scale=scale) + gamma * eye


def _around_mean(table: Tensor) -> Tensor:
    # A common offset of the landmarks changes no distance, but would cost digits.
    return table - table.mean(dim=2, keepdim=True)


def unscaled(inverse: Tensor, root: Tensor | None) -> Tensor:
    """The inverse with the scale of the roots undone."""
    return inverse if root is None else root[..., :, None] * inverse * root[..., None, :]


def divisors(matrix: Tensor, z0: str) -> Tensor | None:
    """Divisors of the initial value, if they depend on more than one matrix; otherwise None."""
    if z0 == "paper":
        return None
    largest = matrix.abs().sum(-2).amax(-1)
    largest = largest.amax() if z0 == "authors" else largest.amax(-1, keepdim=True)
    return largest.expand(matrix.shape[:2]).contiguous()


def unscaled_backward(inverse: Tensor, root: Tensor | None, grad: Tensor) -> tuple[Tensor, Tensor | None]:
    """Gradients of the inverse and of the roots, from that of the inverse with the scale of the roots undone."""
    if root is None:
        return grad, None
    # whole = root_i inverse_ij root_j
    weighed = grad * inverse
    root_grad = (weighed * root[..., None, :]).sum(-1) + (weighed * root[..., :, None]).sum(-2)
    return root[..., :, None] * grad * root[..., None, :], root_grad


def divisors_backward(matrix: Tensor, given: Tensor, divisor_grads: Tensor, z0: str) -> Tensor:
    """Gradient of the matrices through `divisors`: all of the batch, or of a sequence, share the largest column sum."""
    columns = matrix.abs().sum(-2)
    shared = (0, 1) if z0 == "authors" else (1,)
    total = divisor_grads.sum(shared, keepdim=True)[..., None]
    most = (columns == given[..., None]).to(matrix.dtype)
    axes = (*shared, 2)
    return matrix.sign() * (total / most.sum(axes, keepdim=True) * most)[..., None, :]


def matrix_backward(
    table: Tensor,
    few: Tensor | None,
    matrix: Tensor,
    root: Tensor | None,
    grad: Tensor,
    root_grad: Tensor | None,
    scale: float,
    gamma: float,
) -> Tensor:
    """Gradient of the table of landmarks, from the gradient of their matrix."""
    if root is None or root_grad is None:
        m = matrix.shape[-1]
        if few is not None:
            grad = torch.where((few > 0)[:, None, None, None], 0.0, grad)
        scores = scale * matrix * (grad - (grad * matrix).sum(-1, keepdim=True))
        return torch.cat([scores @ table[:, :, m:], scores.mT @ table[:, :, :m]], dim=2)
    ridged = _ridged(table, scale, gamma)
    # matrix = root_i ridged_ij root_j with root = (row sums of ridged)^(-1/2)
    weighed = grad * ridged
    root_grad = root_grad + (weighed * root[..., None, :]).sum(-1) + (weighed * root[..., :, None]).sum(-2)
    ridged_grad = root[..., :, None] * grad * root[..., None, :] - (0.5 * root_grad * root**3)[..., :, None]
    # kernel_ij = exp(-c/2 |l_i - l_j|^2)
    table = _around_mean(table)
    scores = scale * ridged_grad * gaussian_kernel(table, table, scale=scale)
    scores = scores + scores.mT
    return scores @ table - scores.sum(-1, keepdim=True) * table
