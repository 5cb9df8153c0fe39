"""Tasks on language: pretraining on raw texts, tokenizers for it, and classification of texts by fine-tuning."""
