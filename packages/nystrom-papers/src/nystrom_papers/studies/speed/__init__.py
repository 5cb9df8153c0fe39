"""Time and memory of the methods, measured side by side."""
