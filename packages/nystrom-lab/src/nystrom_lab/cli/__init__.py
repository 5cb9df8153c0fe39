"""The commands: each parses its arguments, imports lazily, calls and prints."""
