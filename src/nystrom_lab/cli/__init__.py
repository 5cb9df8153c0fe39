"""What each command does with its words: parse, import lazily, call, print."""
