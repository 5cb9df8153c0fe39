"""A run across several processes: each one's share of a batch, and the loss of a process."""
