"""Sequences over the ranks of a group: what a step costs on paper, and what it costs here."""
