"""Triton kernels of attention through landmarks, and of near_far; the only package that imports triton.

The file of each kernel names its plain form, to which `tests/gpu` holds it; gradients are those of autograd.
"""
