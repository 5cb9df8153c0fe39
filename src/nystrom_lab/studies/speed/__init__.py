"""Time and memory of methods, side by side."""
