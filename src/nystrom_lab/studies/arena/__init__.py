"""What trains on the Long Range Arena, what lifts it there, and what its steps cost."""
