"""Fine-tuning of encoders on labelled texts, and prediction with the fine-tuned models."""
