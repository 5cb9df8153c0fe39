"""What a preset may add to a plain training: a compiled model, denoising, a mean of the weights, tracked errors."""
