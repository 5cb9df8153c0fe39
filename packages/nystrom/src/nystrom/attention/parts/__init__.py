"""Building blocks that methods share: hashing, windows, clusters, sums in stretches, and shared gradients."""
