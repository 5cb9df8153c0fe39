"""Studies of training: how stable it is, how fast models learn, and the output of trained attention."""
