"""Heads of a real encoder: recording them, their pictures, and choosing among their rows."""
