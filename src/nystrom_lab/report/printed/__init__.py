"""What the two papers printed."""
