"""Triton kernels of attention to near tokens, heavy keys and clusters of the rest.

Plain forms: `nystrom.reference.near_far` of the attention, `nystrom.attention.parts.clusters.choose` of the choice.
"""
