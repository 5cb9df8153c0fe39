"""Triton kernels of landmark attention; the only room that imports triton."""
