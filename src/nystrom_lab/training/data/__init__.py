"""What is trained on: tasks, their data, and batches of them."""
