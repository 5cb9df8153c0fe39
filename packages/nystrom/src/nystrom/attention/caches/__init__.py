"""Memory of near_far's earlier tokens: a bounded cache for causal attention, and a compressed context."""
