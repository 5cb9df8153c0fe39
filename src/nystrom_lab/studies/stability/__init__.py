"""Studies of training: how stable it is, how fast it learns, and what trained attention gives."""
