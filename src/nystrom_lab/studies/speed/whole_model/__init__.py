"""Whole encoders over the number of tokens."""
