"""What several methods are made of: hashing, windows, sums in stretches, and gradients that are shared."""
