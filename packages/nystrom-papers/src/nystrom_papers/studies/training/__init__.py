"""Studies that train: pretraining with each method, and fine-tuning compared with exact attention."""
