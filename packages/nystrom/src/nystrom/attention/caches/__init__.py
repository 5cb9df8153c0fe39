"""What near_far stores of earlier tokens: a bounded cache for causal attention, and a compressed context."""
