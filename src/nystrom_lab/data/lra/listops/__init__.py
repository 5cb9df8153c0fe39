"""ListOps: drawn here, or read as it was published."""
