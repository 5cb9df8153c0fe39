"""One method per file: its computation across ranks."""
