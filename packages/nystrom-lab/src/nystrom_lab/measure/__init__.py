"""Measurements as rows, and the counts, times and memory that go into them."""
