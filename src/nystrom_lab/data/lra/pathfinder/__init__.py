"""Pathfinder: drawn here, or read from the published files."""
