"""Triton kernels of attention through landmarks, and of near_far; the only room that imports triton."""
