"""Prepared data sets on disk, read through memory maps."""
