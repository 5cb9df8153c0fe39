"""Triton kernels of attention to near tokens, heavy keys and clusters of the rest."""
