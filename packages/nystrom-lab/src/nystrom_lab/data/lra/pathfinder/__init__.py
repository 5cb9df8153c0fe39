"""Pathfinder: generated here, or read from the published files."""
