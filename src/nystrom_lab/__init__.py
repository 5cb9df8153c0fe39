"""The laboratory: trains, measures and repeats both papers' experiments, under the command `nystrom`."""
