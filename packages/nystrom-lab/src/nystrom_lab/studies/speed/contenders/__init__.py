"""What is timed side by side: this library's methods, the published formula, and other packages."""
