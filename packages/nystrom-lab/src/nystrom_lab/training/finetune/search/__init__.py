"""A search for the best fine-tuning, on one machine or in jobs of a cluster."""
