"""One method a file: its equation, its options and its pure function."""
