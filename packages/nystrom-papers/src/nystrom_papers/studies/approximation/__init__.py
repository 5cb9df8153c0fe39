"""Studies of the approximation itself, on queries, keys and values of a real encoder."""
