"""One method a file: its computation over ranks, under the name of the method."""
