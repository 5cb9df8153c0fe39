"""Training data: tasks, their data sets, and batches."""
