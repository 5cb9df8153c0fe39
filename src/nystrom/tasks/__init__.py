"""Tasks: each file makes, reads and scores one data set of the two papers."""
