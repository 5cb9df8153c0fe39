"""Heads of a real encoder: recordings of them, their pictures, and selections of their rows."""
