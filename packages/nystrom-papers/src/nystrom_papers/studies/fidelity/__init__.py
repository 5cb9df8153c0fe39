"""How close methods come to exact attention, and what they cost in time."""
