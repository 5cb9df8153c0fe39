"""Model folders, checkpoints and tokenizers."""
