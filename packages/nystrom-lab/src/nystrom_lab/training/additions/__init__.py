"""Optional additions to training: a compiled model, denoising, an average of the weights."""
