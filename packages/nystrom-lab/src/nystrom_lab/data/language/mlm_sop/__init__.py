"""Pretraining on masked words and the order of sentences: documents, their tokens, and instances of them."""
