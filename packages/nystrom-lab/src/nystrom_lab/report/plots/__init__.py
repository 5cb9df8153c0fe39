"""Figures of rows and curves, as PNG or SVG files."""
