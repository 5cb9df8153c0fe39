"""Training and evaluation: presets as Python values, and the only package that uses the training engine."""
