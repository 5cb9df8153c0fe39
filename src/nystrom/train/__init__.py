"""Training and evaluation: presets as Python values, and the one room that knows the training engine."""
