"""One run, from its start to its results, and the folder that it leaves."""
