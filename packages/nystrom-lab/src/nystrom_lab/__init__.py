"""The laboratory: trains, measures and repeats both papers' experiments, under the command `nystrom`."""

__version__ = "0.3.0"
