"""One measurement is one row; the clock and the memory that rows are measured by."""
