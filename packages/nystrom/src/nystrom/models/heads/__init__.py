"""Heads on the encoder, and their losses."""
