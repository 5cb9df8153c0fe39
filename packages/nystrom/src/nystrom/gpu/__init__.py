"""Triton kernels of attention through landmarks, and of near_far; the only package that imports triton."""
