"""Published settings as Python values, one file per paper."""
