"""Matrices only: inverses, and what can be said of them. No attention."""

from nystrom.linalg.pinv import pinv, pinv_exact, pinv_iterative, pinv_ridge, residual

__all__ = ["pinv", "pinv_exact", "pinv_iterative", "pinv_ridge", "residual"]
