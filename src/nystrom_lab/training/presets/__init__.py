"""Published settings as Python values, one file a paper."""
