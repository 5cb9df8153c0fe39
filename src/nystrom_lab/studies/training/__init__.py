"""Studies that train: pretraining with each attention, and fine-tuning beside exact attention."""
