"""What trains on the Long Range Arena, what improves the accuracy there, and what the training steps cost."""
