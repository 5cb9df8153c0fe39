"""Time and memory of whole encoders over the number of tokens."""
