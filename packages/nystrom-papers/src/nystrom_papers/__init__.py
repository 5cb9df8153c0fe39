"""Repeats the papers' experiments, and measures attentions side by side, under the command `nystrom`."""

__version__ = "0.3.0"
