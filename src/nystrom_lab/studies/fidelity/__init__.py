"""How near methods come to exact attention, and at what cost in time."""
