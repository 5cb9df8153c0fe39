"""Training and evaluation: presets as Python values, and the only room that uses the training engine."""
