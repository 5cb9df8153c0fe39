"""Folders, checkpoints and tokenizers."""
