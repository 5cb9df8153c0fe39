"""Attention methods: each a pure function, then its Module over head-split tensors."""
