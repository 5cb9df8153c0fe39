"""Time and peak memory of what takes turns: attentions, whole models, training steps."""
