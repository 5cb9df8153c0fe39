"""Sequences split across the ranks of a group: the estimated and the measured cost of a step."""
