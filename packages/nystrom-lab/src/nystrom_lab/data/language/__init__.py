"""Language tasks: pretraining on raw texts, its tokenizers, and text classification by fine-tuning."""
