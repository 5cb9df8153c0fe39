"""Fine-tuning of encoders on labelled texts, and what the fine-tuned models say of other texts."""
