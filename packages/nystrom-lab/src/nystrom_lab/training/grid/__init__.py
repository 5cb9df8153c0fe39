"""Many runs: tasks, methods and seeds."""
