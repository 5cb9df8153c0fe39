"""One run, from its start to its results, and its folder."""
