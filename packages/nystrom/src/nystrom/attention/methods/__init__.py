"""One method per file: its equation, its options and its pure function."""
