"""Readers of what users hold: published archives, and files of rows."""
