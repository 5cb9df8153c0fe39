"""Tasks on language: pretraining on raw texts, and tokenizers for it."""
