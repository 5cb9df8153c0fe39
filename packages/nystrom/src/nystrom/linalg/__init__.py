"""Inverses of the matrix of the landmarks, without attention."""

from nystrom.linalg.pinv import pinv, pinv_exact, pinv_iterative, pinv_ridge, residual

__all__ = ["pinv", "pinv_exact", "pinv_iterative", "pinv_ridge", "residual"]
