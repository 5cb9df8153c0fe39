"""Runs of `nystrom lra run` beside the papers' tables."""
